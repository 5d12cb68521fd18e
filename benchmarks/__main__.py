"""`python -m benchmarks NAME [--json] [options]`: prints a table, or JSON whose last key `ratio` is the figure.

`paper-tables` measures nothing: it prints docs/results/parameters.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from silotune.errors import SilotuneError

NAMES = (
    *(
        "throughput",
        "lora",
        "silos",
        "growth",
        "cohort",
        "blocks",
        "fedmcp-cost",
        "startup",
        "predict",
        "step-ideas",
        "peer-flower",
        "peer-pfl",
        "peer-loop",
    ),
    *("flower-round", "walks", "serve"),
    *(
        "llm-throughput",
        "gpu",
        "memory",
        "loading",
        "quantization",
        "leakage",
        "audit",
        "row-noise",
        "masks",
        "paper-tables",
        "verdicts",
    ),
)


def main() -> int:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true")
    name = parser.parse_known_args()[0].name
    module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
    if hasattr(module, "options"):  # of this benchmark alone
        module.options(parser)
    arguments = vars(parser.parse_intermixed_args())
    as_json = arguments.pop("json")
    del arguments["name"]
    try:
        result = module.measure(**arguments)
    except SilotuneError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if isinstance(result, str):  # a whole document
        print(result)
    elif as_json:
        print(json.dumps(result, indent=1))
    else:
        for key, value in result.items():
            print(f"{key:<28} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
