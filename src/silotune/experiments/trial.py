"""One trial of a search: a run without its test rows, judged on validation rows alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from silotune.config import Config, dump
from silotune.core.files import write_text
from silotune.data.loading import load_absent, load_silos
from silotune.data.tasks import Row
from silotune.errors import Diverged, InputError
from silotune.experiments.runner import Announce, CellKind, Summary
from silotune.models.backbone.backbone import Backbone
from silotune.runs.build.builder import build
from silotune.runs.build.initial_adapter import keep_start
from silotune.runs.build.resolve import make_method
from silotune.runs.engines.base import Progress
from silotune.runs.engines.in_process import InProcess
from silotune.runs.storage.run_folder import working_in

FILE = "trial.json"


def _trial(
    config: Config, path: Path, progress: Progress | None, backbone: Backbone | None, _announce: Announce | None
) -> tuple[Summary, Backbone]:
    """The rounds of a run, and the validation score at its best round (percent, mean over silos).

    The federation is built without test rows, so no test score can take part in a choice. Parts are not kept: the
    values chosen are trained again by whoever uses them. Training that diverges is a result too (None).

    Raises:
        InputError: no silo has validation rows.
    """
    none: list[Row] = []  # one for all: silos that are judged on the same rows go on sharing them
    data = [replace(silo, splits=replace(silo.splits, test=none)) for silo in load_silos(config)]
    make_method(config).setting.head.check_names(silo.task for silo in [*data, *load_absent(config)])
    if not any(silo.splits.validation for silo in data):
        raise InputError("sweep: no silo has validation rows, so there is nothing to choose by")
    federation = build(config, backbone, data)
    with working_in(path, dump(federation.config), federation.backbone.fingerprint, resume=True) as folder:
        keep_start(path, federation.context)
        engine = InProcess(federation, folder, progress)
        found: Summary = {"validation": None, "best_round": None}
        try:
            engine.run()
        except Diverged as error:
            found["reason"] = str(error)
        else:
            found |= {"validation": engine.history.best_validation, "best_round": engine.history.best_round}
        folder.forget_checkpoints()
        write_text(path / FILE, json.dumps(found | {"seconds": engine.history.seconds}, indent=1) + "\n")
    return found, federation.backbone


TRIAL = CellKind(_trial, FILE)
