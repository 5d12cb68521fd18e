"""Run a configuration from its build to its summary, and report progress to callbacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack, cast

from silotune.config import Config, dump, load_resolved
from silotune.config.keys import BackboneKeys, Keys, RunKeys
from silotune.core.determinism import numerics
from silotune.core.files import write_text
from silotune.core.tensors import digest, flatten
from silotune.core.workers import Workers, end_unguarded_worker, registered_engine
from silotune.data.rows import SiloData
from silotune.errors import OR_RESUME, InputError, require_unused
from silotune.evaluation.baselines import baselines, joined
from silotune.evaluation.untouched import scores_backbone, untouched_baselines, without_training
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import transformers_messages_kept
from silotune.runs.build.builder import build, run_warnings
from silotune.runs.build.model import BackboneRequirements
from silotune.runs.build.resolve import chosen_defaults, read_config
from silotune.runs.build.start import keep_start
from silotune.runs.callbacks import Callback
from silotune.runs.callbacks.base import EventFeed
from silotune.runs.callbacks.display import default_display, warn_on_stderr
from silotune.runs.engines.base import Engine, Progress
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.engines.multi_process import IMPORTS, MultiProcessEngine
from silotune.runs.model_folder import write_models
from silotune.runs.run_result import Run
from silotune.runs.storage.checkpoints import Checkpoints
from silotune.runs.storage.readers import events, refusal_warning
from silotune.runs.storage.run_folder import MAY_DIFFER, continued, working_in
from silotune.runs.storage.scored_rows import test_rows_of, write_test_scores
from silotune.runs.summary import intervals, state_digest, summarize
from silotune.training.context import TrainingContext
from silotune.training.federation import Federation


def default_folder(source: str, config: Config) -> Path:
    """Return the run folder if the user gives none: `runs/SOURCE-METHOD-seedN`, or `runs/METHOD-seedN`."""
    return Path("runs") / "-".join(filter(None, (Path(source).stem, config.method.name, f"seed{config.seed}")))


def run(
    source: str | Config,
    *overrides: str,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | Progress | None = None,
    backbone: Backbone | str | BackboneKeys | None = None,
    announce: Callable[[str], None] | None = None,
    workers: int | Workers = 1,
    warn: Callable[[str], None] | None = None,
    callbacks: Sequence[Callback] = (),
    **keys: Unpack[RunKeys],
) -> Run:
    """Run a preset, a YAML file or a configuration: `run("demo", method="fedmcp", rounds=2, train={"lr": 1e-3})`.

    Args:
        source: preset name, path of a YAML file, or a `Config`; empty: the keys alone.
        overrides: `key=value` words, as on the command line.
        out: the run folder; must be new or empty unless `resume`. If None, `runs/SOURCE-METHOD-seedN`.
        resume: continue an interrupted run, or a finished one with more `rounds` (else it is only summarized again).
        progress: True: shows a bar in a notebook, lines on stderr elsewhere; None: the bar only; False: nothing; or
            what is called before every piece of work with (round, description, silos done, silos).
        backbone: one already loaded, to run several configurations over it; or the configuration's key.
        announce: called before the first round, with a line for each key of the head that followed from the model, and
            those of the privacy guarantee.
        warn: called with each warning: about the rows and the head before the first round, about refused updates after
            the last. None: where progress is shown, they are printed on stderr.
        workers: number of processes that train silos, or `Workers` on a Ray cluster; the bits do not depend on it.
        callbacks: follow the run.
        keys: keys of the configuration; a group of keys is a dictionary. `silos` may be tables:
            `{"sms": frame, "news": dataset}`.
    """
    end_unguarded_worker()
    loaded = backbone if isinstance(backbone, Backbone) else None
    values: dict[str, Any] = {**keys} if backbone is None or loaded is not None else {**keys, "backbone": backbone}
    if not isinstance(source, Config):
        config = read_config(source, overrides, (), **cast("Keys", values))
    elif overrides or values:
        raise InputError(f"{[*overrides, *values][0]}: goes with a preset or a file; a Config has its values already")
    else:
        config = read_config(source)
    path = Path(out) if out is not None else default_folder("run" if isinstance(source, Config) else source, config)
    called = progress if callable(progress) else None
    displays = [] if callable(progress) else default_display(progress, config.method.name, config.rounds)
    if warn is None and displays:
        warn = warn_on_stderr
    with (
        numerics(config.precision.deterministic, config.precision.tf32),
        transformers_messages_kept(),
        EventFeed(path, config.rounds, [*callbacks, *displays], called) as feed,
    ):
        finished = _run(config, path, resume, feed, loaded, announce, Workers.of(workers), warn)
        feed.end(finished.summary)
    return finished


def _run(
    config: Config,
    path: Path,
    resume: bool,
    progress: Progress,
    backbone: Backbone | None,
    announce: Callable[[str], None] | None,
    workers: Workers,
    warn: Callable[[str], None] | None,
) -> Run:
    if config.work == "survey":
        raise InputError("survey: asks silos on other machines; use `silotune survey COORDINATOR_YAML …`")
    if not resume:
        require_unused(path, "--out", OR_RESUME)
    if resume:
        config = continued(config, path)
    data: list[SiloData] = []

    def look(silos: list[SiloData], context: TrainingContext, cuts: list[str]) -> None:
        if warn is not None:
            for line in run_warnings(config, silos, context, cuts):
                warn(line)
        data.extend(silos)

    def load(requirements: BackboneRequirements) -> Backbone:
        workers.begin(IMPORTS)
        return requirements.load(on_use=not workers.here)  # the device's memory is left to workers

    federation = build(config, backbone, load=load, look=look)
    without_training(federation)
    if config.rounds and federation.privacy is not None:
        federation.privacy.require_a_round()
    defaults = chosen_defaults(config, federation.config)
    config = federation.config
    with working_in(path, dump(config), federation.backbone, resume, _may_differ(path, federation)) as folder:
        keep_start(path, federation.context)
        folder.describe_data(data)
        engine: Engine = InProcessEngine(federation, folder, progress)
        if not workers.here and config.rounds:
            kind = MultiProcessEngine if workers.cluster is None else registered_engine(workers.engine)
            engine = kind(federation, folder, progress, workers)
        if announce is not None:
            for line in [*defaults, *(federation.privacy.lines() if federation.privacy is not None else ())]:
                announce(line)
        with engine.working():
            engine.run()
            if warn is not None and (refusals := refusal_warning(events(path))):
                warn(refusals)
            shared, whole = digest(flatten(federation.coordinator.shared)), state_digest(federation)
            best = engine.load_best()
            summary = summarize(engine) | {"best_round": best, "shared_sha256": shared, "state_sha256": whole}
        if config.evaluation.baselines:  # after training: importing scikit-learn takes longer than a short round
            central = config.partition.judges_alike
            summary["baselines"] = baselines(data, central)
            if not scores_backbone(config):  # else the run itself is that
                shots, rows = config.evaluation.shots, test_rows_of(federation)
                alone = untouched_baselines(federation.context, data, shots, central, rows)
                summary["baselines"] = joined(summary["baselines"], alone)
        summary["intervals"] = intervals(write_test_scores(path, federation, engine.tested))
        write_models(path, federation, summary)
        write_text(path / "summary.json", json.dumps(summary, indent=1) + "\n")
    return Run(path, summary, federation)


def _may_differ(path: Path, federation: Federation) -> tuple[str, ...]:
    """Return the beginnings of the names of keys in which the configuration may differ from the run's, if there is one.

    With other `rounds`, the rounds that are done must be as they would have been, bit by bit.
    """
    file, rounds = path / "config.yaml", federation.config.rounds
    if not file.exists() or (before := load_resolved(file).rounds) == rounds:
        return MAY_DIFFER
    done = Checkpoints(path / "checkpoints").latest()
    if done is not None and done.round > rounds:
        raise InputError(f"--resume: {path} has done {done.round} rounds; allowed: rounds={done.round} or more")
    reason = _counts_rounds(federation)
    if reason:
        raise InputError(f"--resume: {path} was begun with rounds={before}, and {reason}; allowed: rounds={before}")
    return (*MAY_DIFFER, "rounds:")


def _counts_rounds(federation: Federation) -> str:
    """Name the settings of a run that depend on its number of rounds; "" if there are none."""
    train = federation.config.train
    if any(phase.when == "end" for phase in federation.context.phases):
        return f"method={federation.config.method.name} trains its final phases in the last one"
    if train.schedule_over == "run":
        return "train.schedule_over=run fits the learning rate to them"
    if federation.privacy is not None:
        return "its noise is chosen for them"
    return ""
