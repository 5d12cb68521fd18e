"""Records in one SQLite file: a changed, removed, inserted or moved line is found; a transaction is written or not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3

import pytest

from silotune.core.records import FILE, Records, check_audit
from silotune.errors import InputError


def written(folder, lines=6):
    records = Records(folder)
    for number in range(lines):
        records.append({"kind": "answer", "value": number})
    records.close()


def tampered(folder, *statements):
    with sqlite3.connect(folder / FILE) as connection:
        for statement in statements:
            connection.execute(statement)


MOVED = "UPDATE audit SET line = (SELECT line FROM audit WHERE number = 4) WHERE number = 3"
TAMPERED = {
    "changed": ("UPDATE audit SET line = replace(line, '2', '7') WHERE number = 3", "line 4: line 3 before it was"),
    "removed": ("DELETE FROM audit WHERE number = 3", "lines 3 to 3 are missing"),
    "first removed": ("DELETE FROM audit WHERE number = 1", "lines 1 to 1 are missing"),
    "moved": (MOVED, "line 3: is no line of an audit log, or was moved"),
    "cut": ("DELETE FROM audit WHERE number > 4", "lines 5 to 6 are missing at the end"),
    "no line": ("UPDATE audit SET line = 'nothing' WHERE number = 3", "line 3: is no line"),
    "inserted": ("INSERT INTO audit VALUES (7, '{\"number\": 7}')", "line 7: line 6 before it was changed, or this"),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_what_was_changed_is_found_and_named(how, tmp_path):
    written(tmp_path)
    assert check_audit(tmp_path)[1] == []
    statement, named = TAMPERED[how]
    tampered(tmp_path, statement)
    assert any(named in problem for problem in check_audit(tmp_path)[1]), check_audit(tmp_path)[1]


def test_a_removed_end_is_still_missing_after_more_lines(tmp_path):
    written(tmp_path)
    tampered(tmp_path, "DELETE FROM audit WHERE number > 4")
    written(tmp_path, 1)
    assert check_audit(tmp_path)[1] == ["lines 5 to 6 are missing"]


def test_two_writers_share_one_chain(tmp_path):
    first, second = Records(tmp_path), Records(tmp_path)
    for records in (first, second, first, first, second):
        records.append({"kind": "answer"})
    entries, problems = check_audit(tmp_path)
    assert (len(entries), problems) == (5, [])
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_transaction_that_raises_leaves_nothing(tmp_path):
    records = Records(tmp_path, "CREATE TABLE IF NOT EXISTS counts (n INTEGER)")

    def broken():
        with records.transaction() as connection:
            connection.execute("INSERT INTO counts VALUES (1)")
            records.append({"kind": "answer"})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert records.rows("SELECT * FROM counts") == []
    assert check_audit(tmp_path) == ([], [])


def test_records_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"holds no records \(records\.db\)"):
        check_audit(tmp_path)
    (tmp_path / FILE).write_bytes(b"no database, but longer than nothing" * 20)
    with pytest.raises(InputError, match=r"records\.db: cannot be read or written .*; nothing leaves"):
        Records(tmp_path).append({"kind": "answer"})


def endless(folder):
    records = Records(folder, "CREATE TABLE IF NOT EXISTS counts (n INTEGER)")
    for number in range(10**9):
        with records.transaction() as connection:
            connection.execute("INSERT INTO counts VALUES (?)", (number,))
            records.append({"kind": "answer", "value": number})


def test_killed_at_any_moment_the_records_agree(tmp_path):
    """Each transaction writes a count and a line: after `kill -9` there are as many of one as of the other."""
    forked = multiprocessing.get_context("fork")
    for number in range(8):
        process = forked.Process(target=endless, args=(tmp_path,))
        process.start()
        process.join(0.08 if number else 0.15)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        entries, problems = check_audit(tmp_path)
        ((counts,),) = Records(tmp_path).rows("SELECT COUNT(*) FROM counts")
        assert (len(entries), problems) == (counts, [])
    assert counts > 8
    assert entries[0]["kind"] == "answer"
