"""Write a run's dossier: what a data-protection officer asks, filled from the run's records (`federation dossier`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silotune.config.trees import load_tree
from silotune.core.files import file_sha256, write_text
from silotune.core.records import check_audit
from silotune.deploy.printing import counts_text, incidents, totals
from silotune.distributed.coordinator.job import RunRegistry
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER, log_folder, read_status
from silotune.distributed.protocol.frames import printable
from silotune.distributed.silo.approvals import Approvals
from silotune.distributed.silo.silo_config import PRESETS, read_silo_settings
from silotune.distributed.silo.store import SiloStore
from silotune.distributed.silo.withdrawn_rows import withdrawn_of
from silotune.errors import InputError
from silotune.runs.build.resolve import read_config
from silotune.runs.storage.readers import read_summary, read_versions

_STYLE = "<style>body{max-width:60em;margin:auto;font-family:sans-serif}td{border:1px solid;padding:.2em}</style>"


_ASKS = {"round": "round", "final": "round", "answer": "round", "score": "scores of round", "scores": "scores of round"}
"""Kinds of requests with the combined parts, and of their answers → what they belong to."""


def write_dossier(run: Path, out: Path, about: Path, silos: Sequence[Path] = ()) -> list[Path]:
    """Write a run's dossier as Markdown and as HTML, and return the two files.

    Args:
        run: the run folder, at the coordinator.
        out: the file's name; its ending is replaced.
        about: YAML with what no record says: purpose, parties, and whatever else is to stand there.
        silos: files of silos whose folders are on this machine; the coordinator's records say less of them.
    """
    from jinja2 import Environment, PackageLoader
    from markdown_it import MarkdownIt

    stated = load_tree(about)
    if missing := [key for key in ("purpose", "parties") if not stated.get(key)]:
        raise InputError(f"{about}: lacks {', '.join(missing)}; allowed: purpose, parties, and keys of your own")
    environment = Environment(loader=PackageLoader("silotune.deploy"), trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"cell": _cell, "counts": counts_text}
    text = environment.get_template("dossier.md").render(stated=stated, **_content(run, silos))
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    files = {".md": text, ".html": f'<!doctype html><meta charset="utf-8"><title>{run.name}</title>{_STYLE}\n{html}'}
    for ending, content in files.items():
        write_text(out.with_suffix(ending), content)
    return [out.with_suffix(ending) for ending in files]


def _content(run: Path, silos: Sequence[Path]) -> dict[str, Any]:
    """Return what the template shows; nothing is in it that the records do not hold."""
    summary, folder = read_summary(run), run / FEDERATION_FOLDER
    entries, problems = check_audit(log_folder(run))
    status, name = read_status(folder), RunRegistry.open(run).run
    came: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in entries:
        if entry.get("direction") == "came" and entry.get("run") == name:
            came[str(entry.get("silo"))].append(entry)
    times = [entry["time"] for entry in entries if entry.get("run") == name and "direction" in entry]
    config = read_config(str(folder / "config.yaml"))
    files = [path for path in sorted(run.rglob("*")) if path.suffix in (".yaml", ".json", ".jsonl", ".safetensors")]
    return {
        "run": name,
        "summary": summary,
        "incidents": incidents(run),
        "survey": summary.get("survey", {}).get("silos", {}),
        "privacy": summary.get("privacy"),
        "config": config,
        "before": RunRegistry.id_of_start(config.start) or "no federation's",
        "versions": read_versions(run),
        "silos": {silo: totals(came[silo]).get(name, totals([])) for silo in summary["silos"]},
        "parts": {silo: _keys(own, "tensors") for silo, own in came.items()},
        "beside": {silo: _keys(own, "metrics", "scores") for silo, own in came.items()},
        "recipients": _recipients(entries, name),
        "joined": {entry["silo"]: entry["time"] for entry in reversed(entries) if entry["kind"] == "joined"},
        "own": dict(_own(path, name) for path in silos),
        "guarantee": [] if status is None else status.guarantee,
        "lines": len(entries),
        "problems": problems,
        "began": times[0],
        "ended": times[-1],
        "last": entries[-1],
        "hashes": {str(path.relative_to(run)): file_sha256(path) for path in files},
    }


def _keys(entries: Sequence[Mapping[str, Any]], *fields: str) -> list[str]:
    """Return the names of the parts, or of the numbers, in these fields of messages."""
    mappings = [entry[field] for entry in entries for field in fields if isinstance(entry.get(field), dict)]
    return sorted({name.partition("/")[0] for names in mappings for name in names})


def _recipients(entries: Sequence[Mapping[str, Any]], run: str) -> dict[tuple[str, ...], list[str]]:
    """Return, by the silos to which combined parts were addressed and those whose answers show it, in which rounds."""
    greeted = [entry for entry in entries if entry["kind"] in ("hello", "planned") and entry["direction"] == "came"]
    silos = {entry["node"]: str(entry.get("silo")) for entry in greeted}
    requests: defaultdict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for entry in entries:
        if entry.get("run") == run and entry["kind"] in _ASKS:
            requests[f"{_ASKS[entry['kind']]} {entry['round']}"][entry["direction"] == "came"].add(silos[entry["node"]])
    groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for request, recipients in requests.items():
        groups[tuple(", ".join(sorted(each)) or "nobody" for each in recipients)].append(request)
    return groups


def _own(path: Path, run: str) -> tuple[str, Mapping[str, Any]]:
    """Return a silo's name, and policy, approval and ε from its own file and records."""
    settings = read_silo_settings(path)
    folder, budget, preset = Path(settings.folder), settings.privacy, settings.policy.preset
    store, (entries, problems) = SiloStore(folder), check_audit(folder)
    decided = [each for each in entries if each["kind"] in ("approved", "rejected") and each["run"].startswith(run)]
    return settings.name, {
        "decided": [f"{each['kind']} {each['time']} by {each.get('user', each.get('reason'))}" for each in decided],
        "withdrawn": withdrawn_of(store.records, run),
        "policy": f"{preset}: {PRESETS[preset]}",
        "share": settings.share,
        "approval": next((entry for entry in Approvals(folder).all() if entry.run == run), None),
        "budget": budget,
        "epsilon": None if budget is None else store.ledger.epsilon_of(run, budget.delta),
        "problems": problems,
    }


def _cell(value: object) -> str:
    """Return a value as text for a cell of a table, or a line."""
    plain = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = ", ".join(map(str, value)) if isinstance(value, list) else plain
    return printable(text).replace("|", "\\|").replace("<", "&lt;")
