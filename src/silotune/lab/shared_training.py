"""Train once what several runs of a comparison train alike, because they differ only in how their models predict.

FedDPA's weights of single texts are an example: its Tables 3, 9, 10 and Figure 5 score the same trained parts anew.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from silotune.config import Choice, Config, dump, load_resolved
from silotune.core.files import write_text
from silotune.lab.comparison import Cell
from silotune.models.tuners.start_adapter import FILE
from silotune.runs.build.resolve import make_method, with_options


def trained_by_others(cells: Sequence[Cell]) -> dict[str, Cell]:
    """Find the cells that an earlier one trains for: their folders, each with that cell.

    Where rounds are scored (on validation rows, or by `evaluation.per_round`), scores are part of the rounds, and every
    cell trains for itself.
    """
    trains: dict[str, Cell] = {}
    sources = {}
    for cell in cells:
        config = cell.config
        if config.data.validation_rows != 0 or config.evaluation.per_round:
            continue
        if (first := trains.setdefault(_training(config), cell)) is not cell:
            sources[cell.folder] = first
    return sources


def take_rounds(trained: Path, folder: Path, config: Config) -> None:
    """Begin a run of this configuration at the end of another one's rounds, to the bits that it would have trained.

    Nothing happens where the run has begun, or where the other one's checkpoints are not here.
    """
    if folder.exists() or not (trained / "checkpoints").is_dir():
        return
    before = load_resolved(trained / "config.yaml")
    method = with_options(config, make_method(config)).method
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(trained / "checkpoints", part / "checkpoints")
    for name in ("versions.json", "events.jsonl", FILE):
        if (trained / name).exists():
            shutil.copy(trained / name, part / name)
    write_text(part / "config.yaml", dump(before.replace(method=method, head={"beams": config.head.beams})))
    part.rename(folder)


def _training(config: Config) -> str:
    """Return the configuration as text, without the keys that only predictions read.

    `head.max_new_tokens` is none of them: prompts leave room for the longest answer, in training too.
    """
    method = make_method(config)
    options = method.options.model_dump(mode="json", exclude=set(method.at_prediction))
    return dump(config.replace(method=Choice(name=method.name, **options), head={"beams": 1}))
