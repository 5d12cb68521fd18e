"""Runs the command line: `python -m silotune`."""

from __future__ import annotations

from silotune.cli.main import main

main()
