"""The versions that the Makefile and the container install are not known to be unsafe."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]

SAFE = {"certifi": "2026.10.19"}  # the first that no longer trusts the authorities of eMudhra, which were compromised


def test_no_version_is_known_to_be_unsafe() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {each.name: each for line in lines if line[:1] != "#" for each in [Requirement(line)]}
    for name, first in SAFE.items():
        (specifier,) = pins[name].specifier
        assert specifier.operator == "=="
        assert Version(specifier.version) >= Version(first)
