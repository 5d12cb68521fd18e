"""The version of silotune: read by the build, by `silotune --version` and by the handshake."""

from __future__ import annotations

__version__ = "0.1.0"
