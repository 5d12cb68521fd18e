"""A chained log: a changed, removed, inserted or moved line is found and named; a crash is put right; files rotate."""

from __future__ import annotations

import hashlib
import json

import pytest

from silotune.core.chained_log import ChainedLog, check_chain, rotated_files
from silotune.errors import InputError


def written(folder, lines=6, largest=2**20):
    log = ChainedLog(folder, largest)
    for number in range(lines):
        log.append({"kind": "answer", "value": number})
    return folder / "audit.jsonl"


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


def forged(path, place, **fields):
    """The line at a place, with other fields and a digest that fits."""
    return json.dumps({**json.loads(lines_of(path)[place]), **fields}) + "\n"


TAMPERED = {
    "changed": (lambda path, rows: [*rows[:2], rows[2].replace('"value": 2', '"value": 7'), *rows[3:]], "line 3"),
    "removed": (lambda path, rows: [*rows[:2], *rows[3:]], "lines 3 to 3 are missing"),
    "first removed": (lambda path, rows: rows[1:], "lines 1 to 1 are missing"),
    "inserted": (lambda path, rows: [*rows[:3], forged(path, 2, value=9), *rows[3:]], "line 4: number 3 again"),
    "moved": (lambda path, rows: [rows[0], rows[2], rows[1], *rows[3:]], "line 3: number 2 again, or out of order"),
    "cut": (lambda path, rows: rows[:-2], "lines 5 to 6 are missing at the end"),
    "last changed": (lambda path, rows: [*rows[:-1], forged(path, 5, value=9)], "line 6, the last one, was changed"),
    "no line": (lambda path, rows: [*rows[:2], "nothing\n", *rows[2:]], "line 3: is no line"),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_what_was_changed_is_found_and_named(how, tmp_path):
    path = written(tmp_path)
    assert check_chain(tmp_path)[1] == []
    tamper, named = TAMPERED[how]
    path.write_text("".join(tamper(path, lines_of(path))), encoding="utf-8")
    assert any(named in problem for problem in check_chain(tmp_path)[1]), check_chain(tmp_path)[1]


def test_an_added_last_line_is_found_though_its_digest_fits(tmp_path):
    path = written(tmp_path)
    previous = hashlib.sha256(lines_of(path)[-1].rstrip("\n").encode()).hexdigest()
    with path.open("a") as file:
        file.write(forged(path, 5, number=7, previous=previous))
    assert check_chain(tmp_path)[1] == ["lines 7 to 7 were added after the last one that audit.head names"]


def test_files_rotate_and_the_chain_goes_on(tmp_path):
    written(tmp_path, lines=30, largest=1000)
    assert len(rotated_files(tmp_path)) >= 4
    entries, problems = check_chain(tmp_path)
    assert problems == []
    assert [entry["value"] for entry in entries] == list(range(30))
    rotated_files(tmp_path)[1].unlink()
    assert "are missing" in check_chain(tmp_path)[1][0]


def test_a_crash_between_line_and_head_is_put_right_and_said(tmp_path):
    path = written(tmp_path, lines=2)
    head = (tmp_path / "audit.head").read_bytes()
    ChainedLog(tmp_path).append({"kind": "answer"})
    (tmp_path / "audit.head").write_bytes(head)
    with path.open("a") as file:
        file.write('{"number": 4, "cut o')
    ChainedLog(tmp_path).append({"kind": "answer"})
    entries, problems = check_chain(tmp_path)
    assert problems == []
    assert [entry["kind"] for entry in entries] == ["answer", "answer", "answer", "recovered", "answer"]


def test_nothing_is_recorded_after_an_end_that_was_removed(tmp_path):
    path = written(tmp_path)
    path.write_text("".join(lines_of(path)[:-2]), encoding="utf-8")
    with pytest.raises(InputError, match="its end is not line 6"):
        ChainedLog(tmp_path).append({"kind": "answer"})


def test_two_writers_share_one_chain(tmp_path):
    first, second = ChainedLog(tmp_path), ChainedLog(tmp_path)
    for log in (first, second, first, first, second):
        log.append({"kind": "answer"})
    entries, problems = check_chain(tmp_path)
    assert (len(entries), problems) == (5, [])
