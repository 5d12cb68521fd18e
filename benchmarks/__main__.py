"""`python -m benchmarks NAME [--json]`: prints a table, or JSON whose last key `ratio` is the figure."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

NAMES = ("throughput", "lora")


def main() -> int:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = importlib.import_module(f"benchmarks.{arguments.name}").measure()
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        for key, value in result.items():
            print(f"{key:<28} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
