"""`print_audit`: checks and sums up an audit log, for `silo audit` and `federation audit`."""

from __future__ import annotations

import json
from pathlib import Path

from silotune.errors import SilotuneError


def print_audit(folder: Path, as_json: bool) -> None:
    """Check the audit log in a folder and print sums and problems.

    Raises:
        SilotuneError: it was changed.
    """
    from silotune.cli.console import say
    from silotune.core.chained_log import check_chain
    from silotune.distributed.protocol.audit import totals
    from silotune.distributed.protocol.frames import printable

    entries, problems = check_chain(folder)
    runs = totals(entries)
    last = max((entry["number"] for entry in entries), default=0)
    if as_json:
        print(json.dumps({"lines": len(entries), "last": last, "problems": problems, "runs": runs}, indent=1))
    else:
        for run, total in runs.items():
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(total["kinds"].items()))
            say(f"run {run}: {total['messages']} messages ({kinds}), {total['bytes']:,} bytes")
            say(f"  {total['numbers']:,} numbers, up to round {total['rounds']}, ε {total['epsilon']:g}")
            say(f"  {total['first']} to {total['last']}")
        for entry in entries:
            if "sha256" not in entry:
                words = [str(entry[name]) for name in ("kind", "run", "silo", "user", "reason") if entry.get(name)]
                say(printable(f"{entry['time']} {' '.join(words)}"))
        for problem in problems:
            say(printable(f"CHANGED: {problem}"))
    if problems:
        raise SilotuneError(f"{folder}: the audit log was changed in {len(problems)} places (first: {problems[0]})")
    if not as_json:
        say(f"{len(entries)} lines, none changed, removed or inserted")
