"""A silo's records of sums under masks: survivors that it has signed, and what it needs to go on after a crash.

It signs one list of survivors for given broadcast tensors, ever: the difference of two sums would tell updates.
"""

from __future__ import annotations

import json
from typing import Any

from silotune.communication.masks.agreement import Agreement, MasksRefused
from silotune.core.records import Records

TABLES = """
CREATE TABLE IF NOT EXISTS mask_lists (tensors TEXT PRIMARY KEY, run TEXT, round INTEGER, survivors TEXT);
CREATE TABLE IF NOT EXISTS mask_rounds (agreement TEXT PRIMARY KEY, run TEXT, kept TEXT);
"""


def sign(records: Records, agreement: Agreement, survivors: list[str]) -> None:
    """Store the survivors that the silo is about to sign; refuse them if it signed others for the same tensors."""
    values = agreement.broadcast, agreement.run, agreement.round, json.dumps(survivors)
    query = "SELECT run, round, survivors FROM mask_lists WHERE tensors = ?"
    with records.transaction() as connection:
        connection.execute("INSERT OR IGNORE INTO mask_lists VALUES (?, ?, ?, ?)", values)
        ((run, number, signed),) = records.rows(query, agreement.broadcast)
    known = json.loads(signed)
    if known != survivors:
        raise MasksRefused(
            f"for the same broadcast tensors this silo has signed other survivors, {', '.join(known)} "
            f"(round {number} of run {run}); a second list would tell what the difference of both sent"
        )


def require_stayed(records: Records, agreement: Agreement) -> None:
    """Refuse members that dropped out earlier in the run: the difference of two sums would tell what they sent."""
    query = "SELECT survivors FROM mask_lists WHERE run = ?"
    for (signed,) in records.rows(query, agreement.run):
        back = [name for name in agreement.members if name not in json.loads(signed)]
        if back:
            raise MasksRefused(f"silo {back[0]!r} dropped out of this run; it stays out until the run's end")


def kept(records: Records, agreement: Agreement) -> dict[str, Any]:
    """Return what `keep` stored for an attempt; empty before the silo's first answer."""
    query = "SELECT kept FROM mask_rounds WHERE agreement = ?"
    found = records.rows(query, agreement.digest.hex())
    return json.loads(found[0][0]) if found else {}


def keep(records: Records, agreement: Agreement, kept: dict[str, Any]) -> None:
    """Store what later answers of an attempt depend on, and forget the secrets of the run's other attempts."""
    digest = agreement.digest.hex()
    with records.transaction() as connection:
        connection.execute("DELETE FROM mask_rounds WHERE run = ? AND agreement != ?", (agreement.run, digest))
        values = digest, agreement.run, json.dumps(kept)
        connection.execute("INSERT OR REPLACE INTO mask_rounds VALUES (?, ?, ?)", values)
