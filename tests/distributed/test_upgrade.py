"""A newer Flower changes the SuperLink's database: a copy stays, and an older Flower says so."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from silotune.distributed.flower.database import keep_database
from silotune.errors import InputError

pytest.importorskip("flwr")


def stamp(path: Path, revision: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS alembic_version (version_num TEXT)")
        database.execute("DELETE FROM alembic_version")
        database.execute("INSERT INTO alembic_version VALUES (?)", (revision,))


def stamps(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return [revision for (revision,) in database.execute("SELECT version_num FROM alembic_version")]


def test_a_database_is_copied_once_before_a_newer_flower_changes_it(tmp_path: Path) -> None:
    from alembic.script import ScriptDirectory
    from flwr.supercore.state.alembic.utils import ALEMBIC_DIR

    scripts = ScriptDirectory(str(ALEMBIC_DIR))
    (head,) = scripts.get_heads()
    before = scripts.get_revision(head).down_revision
    assert isinstance(before, str)
    path = tmp_path / "superlink.db"
    assert keep_database(path) is None, "a new federation"
    stamp(path, head)
    assert keep_database(path) is None
    stamp(path, before)
    path.chmod(0o600)
    copy = keep_database(path)
    assert copy is not None
    assert (stamps(copy), copy.stat().st_mode & 0o777) == ([before], 0o600)
    stamp(path, "half-changed")
    with pytest.raises(InputError, match=r"superlink\.db: a newer Flower than .* \(revision half-changed\); install"):
        keep_database(path)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM alembic_version")
    assert (keep_database(path), stamps(copy)) == (None, [before]), "the first copy stays"
    assert sorted(item.name for item in tmp_path.iterdir()) == [path.name, copy.name]
