"""`run`: a configuration from build to summary, by the engine for it; `Run`: its result with silos' models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from silotune.config import Config, dump
from silotune.core.determinism import numerics
from silotune.core.files import write_text
from silotune.core.process_pool import end_unguarded_worker
from silotune.core.tensors import digest, flatten
from silotune.errors import OR_RESUME, require_unused, unknown_name_error
from silotune.evaluation.instance_vectors import keep_instances
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import transformers_messages_kept
from silotune.runs.build.builder import build
from silotune.runs.build.initial_adapter import keep_start
from silotune.runs.build.resolve import BackboneRequirements, read_config
from silotune.runs.engines.base import Engine, Progress
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.engines.multi_process import MultiProcessEngine
from silotune.runs.personal_model import PersonalModel
from silotune.runs.storage.run_folder import continued, working_in
from silotune.runs.summary import state_digest, summarise
from silotune.training.federation import Federation


@dataclass
class Run:
    """A finished run: its summary, and every silo's personalized model at the best round."""

    folder: Path
    summary: dict[str, Any]
    federation: Federation

    @property
    def silos(self) -> dict[str, dict[str, Any]]:
        """Per silo: metric, validation and test score (percent), row counts."""
        return dict(self.summary["silos"])

    def model(self, silo: str) -> PersonalModel:
        """Return the silo's personalized model.

        Raises:
            InputError: if there is no such silo.
        """
        for owner in self.federation.silos.values():
            if silo in owner.evaluations:
                federation = self.federation
                task, texts = federation.tasks[silo], federation.texts[silo]
                return PersonalModel(federation.context, owner, federation.coordinator.shared, task, texts)
        raise unknown_name_error("silo", silo, self.silos)


def run(
    source: str | Config,
    *overrides: str,
    out: str | Path,
    resume: bool = False,
    progress: Progress | None = None,
    backbone: Backbone | None = None,
    announce: Callable[[str], None] | None = None,
    workers: int = 1,
) -> Run:
    """Run a preset, a YAML file or a configuration.

    Args:
        source: preset name, path of a YAML file, or a `Config`.
        overrides: `key=value` words.
        out: the run folder; must be new or empty unless `resume`.
        resume: continue an interrupted run (a finished one is only summarized again).
        progress: called before every piece of work.
        backbone: one already loaded, to run several configurations over it.
        announce: called with each line about the run's privacy guarantee, before the first round.
        workers: number of processes that train silos; the bits do not depend on it.

    Raises:
        InputError: for bad configuration or data, before any training; or for an operation that is not deterministic
            (`precision.deterministic`). The settings of PyTorch and transformers are restored at the end.
    """
    end_unguarded_worker()
    config = source if isinstance(source, Config) else read_config(source, list(overrides))
    with numerics(config.precision.deterministic, config.precision.tf32), transformers_messages_kept():
        return _run(config, Path(out), resume, progress, backbone, announce, workers)


def _run(
    config: Config,
    path: Path,
    resume: bool,
    progress: Progress | None,
    backbone: Backbone | None,
    announce: Callable[[str], None] | None,
    workers: int,
) -> Run:
    if not resume:
        require_unused(path, "--out", OR_RESUME)
    if resume:
        config = continued(config, path)
    # with several processes, the main one leaves the device's memory to the others
    federation = build(config, backbone, load=partial(BackboneRequirements.load, on_use=workers != 1))
    if federation.privacy is not None:
        federation.privacy.require_a_round()
    config = federation.config
    with working_in(path, dump(config), federation.backbone, resume) as folder:
        keep_start(path, federation.context)
        engine: Engine = InProcessEngine(federation, folder, progress)
        if workers != 1:
            engine = MultiProcessEngine(federation, folder, progress, workers)
        if announce is not None and federation.privacy is not None:
            for line in federation.privacy.lines():
                announce(line)
        engine.run()
        shared, whole = digest(flatten(federation.coordinator.shared)), state_digest(federation)
        best = engine.load_best()
        summary = summarise(engine) | {"best_round": best, "shared_sha256": shared, "state_sha256": whole}
        keep_instances(path, federation.silos.values())
        write_text(path / "summary.json", json.dumps(summary, indent=1) + "\n")
    return Run(path, summary, federation)
