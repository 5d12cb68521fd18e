"""Kept answers: computed once for code and words, and never where they might be others."""

from __future__ import annotations

import pytest

from silotune.core import kept_answers
from silotune.core.kept_answers import cache_folder, kept_answer


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """`ask("a", "b")` → the answer to these words, which counts how often any was computed."""
    monkeypatch.setenv("SILOTUNE_CACHE", str(tmp_path / "cache"))
    computed = []

    def compute():
        computed.append(1)
        return {"number": len(computed)}

    return lambda *words: kept_answer("test", words, ("json",), compute)["number"]


def test_an_answer_is_computed_once_for_its_words(ask, tmp_path):
    assert [ask("a"), ask("a"), ask("b"), ask("a", "b"), ask("b")] == [1, 1, 2, 3, 2]
    assert len(list((tmp_path / "cache/answers").iterdir())) == 3
    assert (tmp_path / "cache/answers").stat().st_mode & 0o077 == 0


def test_other_code_is_asked_anew(ask, monkeypatch, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/module.py").write_text("one")
    monkeypatch.setattr(kept_answers, "_PACKAGE", tmp_path / "package")
    assert [ask("a"), ask("a")] == [1, 1]
    (tmp_path / "package/module.py").write_text("three")
    assert ask("a") == 2


def test_nothing_is_kept_with_plug_ins_or_if_off(ask, monkeypatch, tmp_path):
    class Groups:
        groups = frozenset({"silotune.method", "console_scripts"})

    with monkeypatch.context() as patched:
        patched.setattr(kept_answers, "entry_points", Groups)
        assert [ask("a"), ask("a")] == [1, 2]
    monkeypatch.setenv("SILOTUNE_CACHE", "off")
    assert cache_folder() is None
    assert ask("a") == 3
    assert not (tmp_path / "cache").exists()


def test_a_damaged_file_is_replaced_and_old_ones_leave(ask, monkeypatch, tmp_path):
    ask("a")
    [file] = (tmp_path / "cache/answers").iterdir()
    file.write_text("{")
    assert [ask("a"), ask("a")] == [2, 2]
    monkeypatch.setattr(kept_answers, "_MOST", 2)
    for word in "bcd":
        ask(word)
    assert len(list((tmp_path / "cache/answers").iterdir())) == 2
