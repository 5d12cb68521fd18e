"""`rows_digest` of a silo's rows; `RowRecord`: where they change within a run, the silo says so, or refuses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from silotune.config import Config
from silotune.core.clock import log_line
from silotune.core.files import write_text
from silotune.data.rows import Splits
from silotune.distributed.protocol.handshake import HandshakeRefused
from silotune.distributed.silo.approvals import configuration_digest
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.state_store import StateStore
from silotune.errors import InputError

FILE = "rows.json"

CHANGED = "its rows changed within this run"


def rows_digest(splits: Splits) -> str:
    """Return the sha256 of all rows, in order, by split."""
    digest = hashlib.sha256()
    for name in ("train", "validation", "test"):
        for row in getattr(splits, name):
            fields = asdict(row)
            if row.target is None:  # as in records of earlier versions
                del fields["target"]
            digest.update(json.dumps([name, fields]).encode())
    return digest.hexdigest()


class RowRecord:
    """The digests of the rows with which a silo took part in each run, in the run's folder at the silo.

    Rows are compared under the same configuration, whatever its section `federation`: another one splits them anew.

    Args:
        settings: the operator's.
    """

    def __init__(self, settings: SiloSettings) -> None:
        self._settings = settings

    def check(self, run: str, config: Config, digest: str) -> str:
        """Compare the rows with those that the run has used so far.

        Args:
            run: the run's id.
            config: the run's, as it was sent.
            digest: of the present rows, as `rows_digest`.

        Returns:
            A note for the coordinator if the rows changed; empty otherwise.

        Raises:
            HandshakeRefused: the rows changed, and the operator's file does not accept that.
        """
        seen = self._read(run).get(_key(config), [])
        if seen and seen[-1] != digest and self._settings.changed_rows == "refuse":
            raise HandshakeRefused(
                f"silo {self._settings.name!r}: {CHANGED}; its silo config has changed_rows: refuse (or accept)"
            )
        return CHANGED if {*seen, digest} > {digest} else ""

    def keep(self, run: str, config: Config, digest: str) -> None:
        """Record the rows that a request is about to use; arguments as `check`."""
        known, key = self._read(run), _key(config)
        seen = known.get(key, [])
        if seen[-1:] == [digest]:
            return
        store = StateStore(Path(self._settings.folder), run)
        store.make()
        write_text(store.path / FILE, json.dumps({**known, key: [*seen, digest]}, indent=1) + "\n")
        if seen:
            log_line(f"silotune worker {self._settings.name!r}: {CHANGED} (run {run}); accepted by changed_rows")

    def _read(self, run: str) -> Mapping[str, list[str]]:
        """Return the digests used so far, oldest first, by configuration."""
        path = StateStore(Path(self._settings.folder), run).path / FILE
        try:
            return {str(key): list(map(str, seen)) for key, seen in json.loads(path.read_text("utf-8")).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise InputError(f"rows: the record of those that a run used cannot be read ({FILE})") from error


def _key(config: Config) -> str:
    tree = config.model_dump(mode="json")
    return configuration_digest({name: value for name, value in tree.items() if name != "federation"})
