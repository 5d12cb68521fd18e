"""A silo's records of sums under masks: what it adds to which, survivors that it has signed, and secrets of an attempt.

It adds one summand to the sums of a round, trained from the state whose summand went into the sum before, and signs one
list of survivors for given broadcast tensors, ever: the difference of two sums would tell updates.
"""

from __future__ import annotations

import json
from typing import Any

from silotune.communication.masks.agreement import FIRST, Agreement, MasksRefused
from silotune.core.records import Records

TABLES = """
CREATE TABLE IF NOT EXISTS mask_lists (tensors TEXT PRIMARY KEY, run TEXT, round INTEGER, survivors TEXT);
CREATE TABLE IF NOT EXISTS mask_sums (run TEXT, round INTEGER, tensors TEXT, after TEXT, summand TEXT,
    PRIMARY KEY (run, round));
CREATE TABLE IF NOT EXISTS mask_rounds (agreement TEXT PRIMARY KEY, run TEXT, kept TEXT);
"""


def require_next(records: Records, run: str, number: int, base: str, after: str) -> None:
    """Refuse to train a round from another state than that of the last sum, or anew once a sum of it was begun.

    `base` and `after` are those of the agreements of this round and of the next.
    """
    query = "SELECT round, after FROM mask_sums WHERE run = ? AND round <= ? ORDER BY round DESC LIMIT 2"
    sums = dict(records.rows(query, run, number))
    if sums.pop(number, after) != after:
        raise MasksRefused(f"a sum of round {number} was begun here; the round is not trained anew from anything else")
    last = next(iter(sums.values()), FIRST)
    if base != last:
        raise MasksRefused(f"asked to start from {base:.20}; the last sum that was begun here is {last:.20}")


def begin(records: Records, agreement: Agreement, after: str, summand: str) -> None:
    """Store a round's summand (its sha256) before it leaves under masks; refuse a second one, or other members.

    Raises:
        MasksRefused: another summand, broadcast or start of this round was stored; or a member dropped out of the run,
            or of an earlier sum of these tensors: the difference of two sums would tell what it sent.
    """
    require_next(records, agreement.run, agreement.round, agreement.base, after)
    values = agreement.broadcast, after, summand
    with records.transaction() as connection:
        new = agreement.run, agreement.round, *values
        connection.execute("INSERT OR IGNORE INTO mask_sums VALUES (?, ?, ?, ?, ?)", new)
        query = "SELECT tensors, after, summand FROM mask_sums WHERE run = ? AND round = ?"
        if records.rows(query, agreement.run, agreement.round) != [values]:
            raise MasksRefused(f"another summand of round {agreement.round} than that with which its sum was begun")
    query = "SELECT survivors FROM mask_lists WHERE run = ? OR tensors IN (SELECT tensors FROM mask_sums WHERE run = ?)"
    for (signed,) in records.rows(query, agreement.run, agreement.run):
        back = [name for name in agreement.members if name not in json.loads(signed)]
        if back:
            raise MasksRefused(
                f"silo {back[0]!r} dropped out of this run, or of a sum of the same tensors; it stays out"
            )


def sign(records: Records, agreement: Agreement, survivors: list[str]) -> None:
    """Store the survivors that the silo is about to sign; refuse them if it signed others for the same tensors."""
    values = agreement.broadcast, agreement.run, agreement.round, json.dumps(survivors)
    query = "SELECT run, round, survivors FROM mask_lists WHERE tensors = ?"
    with records.transaction() as connection:
        connection.execute("INSERT OR IGNORE INTO mask_lists VALUES (?, ?, ?, ?)", values)
        ((run, number, signed),) = records.rows(query, agreement.broadcast)
    names = json.loads(signed)
    if names != survivors:
        raise MasksRefused(
            f"for the same broadcast tensors this silo has signed other survivors, {', '.join(names)} "
            f"(round {number} of run {run}); a second list would tell what the difference of both sent"
        )


def kept(records: Records, agreement: Agreement) -> dict[str, Any]:
    """Return what `keep` stored for an attempt; empty before the silo's first answer."""
    query = "SELECT kept FROM mask_rounds WHERE agreement = ?"
    rows = records.rows(query, agreement.keys.digest.hex())
    return json.loads(rows[0][0]) if rows else {}


def keep(records: Records, agreement: Agreement, content: dict[str, Any]) -> None:
    """Store what later answers of an attempt depend on, and forget the secrets of the run's other attempts."""
    digest = agreement.keys.digest.hex()
    with records.transaction() as connection:
        connection.execute("DELETE FROM mask_rounds WHERE run = ? AND agreement != ?", (agreement.run, digest))
        values = digest, agreement.run, json.dumps(content)
        connection.execute("INSERT OR REPLACE INTO mask_rounds VALUES (?, ?, ?)", values)


def erase(records: Records, run: str) -> None:
    """Erase the secrets of a run that has ended: its seeds, shares and keys."""
    with records.transaction() as connection:
        connection.execute("DELETE FROM mask_rounds WHERE run = ?", (run,))
