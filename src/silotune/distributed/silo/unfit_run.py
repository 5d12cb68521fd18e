"""`UnfitRun`: a run that does not fit a silo's rows; its operator reads why, its coordinator the key alone."""

from __future__ import annotations

import re

from silotune.config import Config
from silotune.distributed.protocol.handshake import HandshakeRefused
from silotune.errors import InputError, SilotuneError

_KEY = re.compile(r"[a-z_]+(\.[a-z_]+)*(?=[=:])")
"""The key with which an error begins."""


class UnfitRun(InputError):
    """A run that does not fit the silo's rows. The reason may tell of them: it is for the operator.

    Args:
        silo: the silo's name.
        config: the run's, as it was sent.
        reason: why the run cannot take place here.
    """

    def __init__(self, silo: str, config: Config, reason: SilotuneError) -> None:
        super().__init__(str(reason))
        self.silo = silo
        self.config = config
        self.reason = reason

    def told(self) -> SilotuneError:
        """Return what leaves if the run is approved: of numbers, which may be of rows, the key alone."""
        text = str(self.reason)
        if isinstance(self.reason, HandshakeRefused) or not any(map(str.isdigit, text)):
            return self.reason
        key = _KEY.match(text)
        where = f" ({key[0]})" if key else ""
        return InputError(
            f"silo {self.silo!r}: the run does not fit its rows{where}; the numbers are in the silo's own log"
        )
