"""The SuperLink's database: a newer Flower changes its tables when it starts, and an older one then refuses it."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from importlib.metadata import version
from pathlib import Path

from silotune.errors import InputError


def keep_database(path: Path) -> Path | None:
    """Copy a SuperLink's database beside itself if the installed Flower will change it: the way back from an upgrade.

    Called before the SuperLink starts. A copy that is there stays: a start that broke off may have changed the rest.

    Returns:
        The copy; None where nothing changes.

    Raises:
        InputError: a newer Flower has changed it.
    """
    from alembic.script import ScriptDirectory
    from flwr.supercore.state.alembic.utils import ALEMBIC_DIR

    if not path.is_file():
        return None
    scripts = ScriptDirectory(str(ALEMBIC_DIR))
    with contextlib.closing(sqlite3.connect(path)) as database:
        stamped = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone()
        query = "SELECT version_num FROM alembic_version" if stamped else "SELECT 1 WHERE 0"
        revisions = {revision for (revision,) in database.execute(query)}
        if unknown := revisions - {script.revision for script in scripts.walk_revisions()}:
            raise InputError(
                f"{path}: a newer Flower than {version('flwr')} has changed it (revision {', '.join(sorted(unknown))});"
                f" install that version again, or put back a copy from before, such as {path.name}.before-flower-…"
            )
        copy = path.with_name(f"{path.name}.before-flower-{version('flwr')}")
        if revisions == set(scripts.get_heads()) or copy.exists():
            return None
        half = copy.with_suffix(".half")
        with contextlib.closing(sqlite3.connect(half)) as target:
            database.backup(target)
    shutil.copymode(path, half)
    half.replace(copy)
    return copy
