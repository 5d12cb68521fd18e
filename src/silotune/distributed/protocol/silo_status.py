"""`SiloStatus`: what a silo says of its operation (rows changed, ε left, disk), if its operator allows.

The field is optional: parties that do not know it leave it out, or do not read it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

_FINGERPRINT = re.compile(r"[0-9a-f]{16,64}")

_LARGEST = 2**63


@dataclass(frozen=True)
class SiloStatus:
    """A silo's state of operation; None where it is not known.

    Args:
        rows_fingerprint: changes whenever the rows in use change; says nothing else about them.
        epsilon_left: ε of the operator's budget that no run has spent; None without a budget.
        disk_free_bytes: free space where the silo keeps its states.
    """

    rows_fingerprint: str | None = None
    epsilon_left: float | None = None
    disk_free_bytes: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return plain values for a frame."""
        return asdict(self)

    @classmethod
    def read(cls, fields: object) -> SiloStatus | None:
        """Parse what a silo sent; values of another form are dropped. None if it sent no status."""
        if not isinstance(fields, dict):
            return None
        fingerprint, epsilon, disk = (fields.get(name) for name in cls.__dataclass_fields__)
        named = isinstance(fingerprint, str) and _FINGERPRINT.fullmatch(fingerprint)
        return cls(
            rows_fingerprint=fingerprint if named else None,
            epsilon_left=_number(epsilon, int, float),
            disk_free_bytes=None if (free := _number(disk, int)) is None else int(free),
        )


def _number(value: Any, *types: type) -> float | None:
    """Return a number from 0 on of one of these types; None for anything else."""
    return value if type(value) in types and 0 <= value <= _LARGEST else None
