"""A trial of a sweep: a run that never sees test rows, and whose result is its validation score."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from silotune.config import Config, dump
from silotune.core.determinism import numerics
from silotune.core.files import write_text
from silotune.data.loading import load_absent, load_silos
from silotune.data.rows import Row
from silotune.errors import Diverged, InputError
from silotune.lab.runner import Announce, CellKind, Summary
from silotune.models.backbone.backbone import Backbone
from silotune.runs.build.builder import build
from silotune.runs.build.read_start import keep_start
from silotune.runs.build.resolve import make_method
from silotune.runs.build.validation import check_labels
from silotune.runs.callbacks import Callback
from silotune.runs.callbacks.feed import EventFeed
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.storage.run_folder import working_in

FILE = "trial.json"


def _trial(
    config: Config,
    path: Path,
    callbacks: Sequence[Callback],
    backbone: Backbone | None,
    _announce: Announce | None,
) -> tuple[Summary, Backbone]:
    """Run a trial.

    Without test rows, no test score can influence the choice of values. Trained parts are discarded: the chosen values
    are trained again later. Divergence is a result, too (validation score None).

    Returns:
        The summary with the validation score at the best round (percent, mean over silos), and the backbone.
    """
    none: list[Row] = []  # one object: silos that share validation rows must share their test rows, too
    data = [replace(silo, splits=replace(silo.splits, test=none)) for silo in load_silos(config)]
    tasks = [silo.task for silo in [*data, *load_absent(config)]]
    make_method(config).setting.head.check_names(tasks)
    check_labels(config, tasks)
    if not any(silo.splits.validation for silo in data):
        raise InputError("sweep: no silo has validation rows, so there is nothing to choose by")
    federation = build(config, backbone, data)
    with (
        EventFeed(path, config.rounds, callbacks) as feed,
        working_in(path, dump(federation.config), federation.backbone, resume=True) as folder,
    ):
        keep_start(path, federation.context)
        engine = InProcessEngine(federation, folder, feed)
        summary: Summary = {"validation": None, "best_round": None}
        try:
            with numerics(config.precision.deterministic, config.precision.tf32):
                engine.run()
        except Diverged as error:
            summary["reason"] = str(error)
        else:
            summary |= {"validation": engine.history.best_validation, "best_round": engine.history.best_round}
            summary |= {"lower_is_better": True} if federation.lower_is_better else {}
        folder.checkpoints.forget()
        write_text(path / FILE, json.dumps(summary | {"seconds": engine.history.seconds}, indent=1) + "\n")
    return summary, federation.backbone


TRIAL = CellKind(_trial, FILE)
