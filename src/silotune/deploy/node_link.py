"""A node's link to the coordinator: tried now and then, and kept in `link.json` for `status` and metrics."""

from __future__ import annotations

import json
import time
from pathlib import Path

from silotune.core.clock import utc_now
from silotune.core.files import write_text
from silotune.deploy.certificates import days_left
from silotune.deploy.enrollment import ask
from silotune.deploy.settings import NodeSettings
from silotune.distributed.metrics import LINK_FILE, Link, read_link
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.errors import SilotuneError

INTERVAL = 30.0
"""Seconds between tries."""


class NodeLink:
    """Tries whether the coordinator answers, with the node's own settings and this machine's proxy."""

    def __init__(self, settings: SiloSettings | NodeSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._next = 0.0

    def try_now(self) -> None:
        """Try, and keep the result.

        Raises:
            SilotuneError: why the coordinator cannot be reached.
        """
        self._next = time.monotonic() + INTERVAL
        address, authority = str(self._settings.superlink), Path(str(self._settings.root_certificates))
        try:
            status, answer = ask(address, authority, "GET", "/health", seconds=10)
            if status != 200:
                raise SilotuneError(f"coordinator {address}: /health answers {status}")
        except SilotuneError as error:
            self.keep(str(error))
            raise
        self.keep("", {"coordinator": answer["days"], "authority": days_left(authority.read_bytes())})

    def look(self) -> None:
        """Try if it is time; a failure is kept alone, as Flower's node tries again by itself."""
        if time.monotonic() >= self._next:
            try:
                self.try_now()
            except SilotuneError:
                return

    def keep(self, reason: str, days: dict[str, float] | None = None) -> None:
        """Keep that the link is up, or the reason why it is not.

        Args:
            reason: empty if it is up.
            days: certificate → days left; None: as before.
        """
        before = read_link(self._folder)
        same = before is not None and (not before.reason) == (not reason)
        before = before or Link("", "", 0, {})
        since, losses = before.since if same else utc_now(), before.losses + (bool(reason) and not same)
        left = before.days if days is None else {name: int(number) for name, number in days.items()}
        found = Link(since, reason, losses, left)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_text(self._folder / LINK_FILE, json.dumps(vars(found)))
