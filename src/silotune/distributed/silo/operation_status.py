"""`operation_status` fills in a silo's `SiloStatus`: keyed digest of its rows, ε left, free space."""

from __future__ import annotations

import hashlib
import hmac
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from silotune.distributed.protocol.silo_status import SiloStatus
from silotune.distributed.silo.privacy_ledger import Price, PrivacyLedger
from silotune.distributed.silo.secret import derived_from_secret
from silotune.distributed.silo.silo_config import SiloSettings

if TYPE_CHECKING:
    from silotune.communication.privacy.budget import Privacy


def operation_status(settings: SiloSettings, rows: str, run: str, privacy: Privacy | None) -> SiloStatus:
    """Return a silo's present state of operation; of free space two digits, as files of predictions tell answers.

    Args:
        settings: the operator's.
        rows: digest of those in use (`row_fingerprint.rows_digest`).
        run: the run's id.
        privacy: the run's guarantee; None if it adds no noise at silos.
    """
    folder = Path(settings.folder)
    return SiloStatus(
        rows_fingerprint=rows_fingerprint(rows, derived_from_secret(folder, "status")),
        epsilon_left=_epsilon_left(settings, folder, run, privacy),
        disk_free_bytes=None if (free := free_bytes(folder)) is None else int(float(f"{free:.1e}")),
    )


def rows_fingerprint(rows: str, key: bytes) -> str:
    """Return a keyed digest of the rows' digest: without the key nobody can try rows against it."""
    return hmac.new(key, rows.encode(), hashlib.sha256).hexdigest()[:32]


def free_bytes(folder: Path) -> int | None:
    """Return the free space where a folder is, in bytes; None if it cannot be asked for."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def _epsilon_left(settings: SiloSettings, folder: Path, run: str, privacy: Privacy | None) -> float | None:
    """Return the rest of the operator's budget, composed as the worker does before it answers; None without one."""
    if settings.budget is None:
        return None
    ledger = PrivacyLedger(folder)
    spent = ledger.total()
    if privacy is not None:
        before = ledger.spent(run, Price.of(privacy))
        spent = before.epsilon + (privacy.account.total(before.uses) if before.uses else 0.0)
    return max(0.0, settings.budget - spent)
