"""Tables and figures of finished runs."""

from __future__ import annotations
