"""`DiskRoom`: how many bytes a run's folder at a silo may still take, by its operator's policy."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from silotune.distributed.silo.policy import Policy
from silotune.distributed.silo.state_store import RUN_ID

MIB = 2**20


@dataclass(frozen=True)
class DiskRoom:
    """Judges files before they are written.

    Args:
        policy: the operator's limits.
        folder: the silo's folder; that of a run is in it, under the run's id.
    """

    policy: Policy
    folder: Path

    def check(self, run: Path, more: int) -> None:
        """Judge files that are about to be written.

        Args:
            run: the run's folder.
            more: their bytes, without those of files that they replace.

        Raises:
            PolicyRefused: naming the limit.
        """
        limits = self.policy.limits
        if limits.disk_mib is not None and used(run) + more > limits.disk_mib * MIB:
            raise self.policy.refused(
                "more files of this run on the silo's disk", f"at most {limits.disk_mib:,} MiB (policy.disk_mib)"
            )
        if limits.disk_mib_in_all is None:
            return
        runs = [path for path in self.folder.glob("*") if RUN_ID.fullmatch(path.name)]
        if sum(map(used, runs)) + more > limits.disk_mib_in_all * MIB:
            raise self.policy.refused(
                "more files of all runs on the silo's disk",
                f"at most {limits.disk_mib_in_all:,} MiB (policy.disk_mib_in_all); its operator may remove the folders "
                "of finished runs",
            )


def used(folder: Path) -> int:
    """Return the bytes of the files in a folder and below it; 0 if there is none."""
    total = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(path, file)).st_size
    return total
