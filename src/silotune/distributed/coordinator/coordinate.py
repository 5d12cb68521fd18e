"""A coordinator's whole run: it greets silos, runs the rounds, and writes summary and status."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from silotune.communication.masks.fixed_point import require_masks
from silotune.communication.masks.shared_noise import SharedNoise
from silotune.communication.privacy.accountant import DELTA
from silotune.communication.privacy.row_accountant import UNCOVERED, RowAccount
from silotune.config import Config, dump
from silotune.config.uplink import NOTICEABLE
from silotune.core.clock import current_user, log_line
from silotune.core.determinism import set_numerics
from silotune.core.files import folder_lock, write_text
from silotune.core.records import Records
from silotune.core.tensors import digest, flatten
from silotune.data.row_folder import read_rows
from silotune.data.rows import SiloData
from silotune.distributed.coordinator.dispatcher import SiloDispatcher
from silotune.distributed.coordinator.engine import FlowerEngine
from silotune.distributed.coordinator.job import AdmissionPolicy, CoordinatorJob, RunRegistry, SiloInfo
from silotune.distributed.coordinator.masked_engine import MaskedEngine
from silotune.distributed.coordinator.run_status import FEDERATION_FOLDER, RunStatus
from silotune.distributed.flower.link import ConnectionLost, Link
from silotune.distributed.protocol.frames import WAITS_FOR_APPROVAL, Frame
from silotune.distributed.protocol.handshake import Hello, Identity, wire_config
from silotune.errors import InputError, SilotuneError
from silotune.evaluation.untouched import check_untouched, without_training
from silotune.methods import Method
from silotune.methods.parts import Scope, names_with
from silotune.models.backbone.backbone import Backbone
from silotune.runs.build.coordinator import build_coordinator
from silotune.runs.build.model import BackboneRequirements, build_model
from silotune.runs.build.resolve import check_ranks, read_config, resolve, with_ranks
from silotune.runs.build.silos import server_silo
from silotune.runs.build.start import keep_start, read_start
from silotune.runs.build.validation import check_labels, check_tasks
from silotune.runs.engines.base import Progress
from silotune.runs.model_folder import gather_models, write_models, write_shared_model
from silotune.runs.storage.run_folder import RunFolder
from silotune.runs.summary import state_digest, summarize
from silotune.training.federation import Federation
from silotune.training.shared_step import SharedStep
from silotune.training.silo import SiloState, silos_without_rows

PREDECESSOR_TIMEOUT = 30.0
"""Seconds to wait for an earlier coordinator in the folder to end."""


def coordinate(job: CoordinatorJob, link: Link) -> None:
    """Run a job to its end and record how it goes and ends in `federation/status.json`."""
    folder = Path(job.out) / FEDERATION_FOLDER
    # `flower-local` holds the run folder's lock itself; a coordinator that this one replaces may be about to end
    with nullcontext() if job.local else folder_lock(Path(job.out)), folder_lock(folder, PREDECESSOR_TIMEOUT):
        status, record = RunStatus.begin(folder), Records(folder)
        record.append({"kind": "started", "user": current_user(), "process": os.getpid()})
        try:
            (run_plan if job.cells else run_job)(job, link, record, status)
        except Exception as error:  # not KeyboardInterrupt: a run that is interrupted has no outcome
            status.end(error, resumable=isinstance(error, ConnectionLost))
            record.append({"kind": "ended", "reason": f"{type(error).__name__}: {error}"[:500]})
            raise
        status.end()
        record.append({"kind": "ended", "reason": "finished"})


Load = Callable[[BackboneRequirements], Backbone]


@dataclass
class RunStart:
    """A run as prepared before its silos join; `names` are theirs, sorted; `request` has the fields of all requests."""

    job: CoordinatorJob
    config: Config
    names: list[str]
    method: Method
    backbone: Backbone
    admission: AdmissionPolicy
    request: dict[str, Any]

    @classmethod
    def of(cls, job: CoordinatorJob, record: Records, load: Load) -> RunStart:
        """Check a job, load its backbone, and give the run its id."""
        config, method = resolve(read_config(job.config))
        names = _checked_names(job, config)
        check_untouched(config, method.setting.head)
        backbone = load(BackboneRequirements.of(config, method))
        read_start(config, method, (), backbone)  # refuses another method's run before anyone is asked
        before = RunRegistry.id_of_start(config.start)  # silos know a federation's run by its id
        text = wire_config(config if before is None else config.replace(start=f"run-{before}"), names)
        admission = AdmissionPolicy(Identity.of(backbone), _registry(config, Path(job.out), names), record, config)
        admission.registry.write(Path(job.out))  # a start that nobody approved in time goes on under the same id
        request = {"run": admission.registry.run, "config": text, "identity": admission.identity.fields()}
        return cls(job, config, names, method, backbone, admission, request)

    def federation(self) -> Federation:
        """Build the federation of the silos that were let in, and compare the shapes of their parts."""
        config, method, silos = self.config, self.method, self.admission.registry.silos
        labeled = _labeled(self.job, config, bool(method.server_phases()))
        # also of silos that have left the run: its configuration stays
        bounded = {name: silo.rank for name, silo in silos.items() if silo.rank is not None}
        if bounded:
            config, method = resolve(with_ranks(config, bounded))
        check_ranks(method, [*self.names, *silos])
        federation = _federation(config, method, self.backbone, {name: silos[name] for name in self.names}, labeled)
        self.admission.expect(lambda silo: federation.coordinator.expected_of(silo).shapes)
        return federation


def run_job(
    job: CoordinatorJob, link: Link, record: Records, status: RunStatus, load: Load = BackboneRequirements.load
) -> None:
    """Run one job: handshakes with its silos, then training."""
    out, start = Path(job.out), RunStart.of(job, record, load)
    failures, admission = FailureLog(status.report), start.admission
    members, greeting = admission.registry.silos, Frame("hello", start.request)
    dispatcher = greet(start, link, greeting, admission, failures, status, record, members)
    federation = start.federation()
    if start.config.privacy.shares:
        shares = SharedNoise.read(admission.shares)
        federation.coordinator.shared_step = SharedStep(shares, federation.context)
    folder = RunFolder.begin(out, dump(federation.config), federation.backbone, resume=True)
    keep_start(out, federation.context)
    with closing(folder.checkpoints):
        failures.folder = folder
        admission.registry.write(out)
        lines = [] if federation.privacy is None else federation.privacy.lines()
        if (own := start.config.privacy).unit is not None:
            lines.append(
                f"privacy: every silo adds noise on its rows for ε = {own.epsilon:g} at δ ≤ {own.delta or DELTA:g} for "
                f"each {own.unit}{'' if own.parts == 'all' else f'; not for {UNCOVERED}'}"
            )
        if own.shares:
            lines.append(f"privacy: silos share one noise, and ε holds {shares.assumption}")
        for name, times in sorted(admission.noise.items()):
            if times > NOTICEABLE:
                folder.event("more-noise", silo=name, times=times)
                lines.append(f"privacy: silo {name!r} adds {times:.3g} times the noise, for what its budget has left")
        if lines:
            status.promise(lines)
            for line in lines:
                log_line(f"silotune coordinator: {line}", sys.stdout)
        kind = MaskedEngine if federation.coordinator.secure else FlowerEngine
        engine = kind(federation, folder, dispatcher, start.request, admission, job.local, status.report)
        more = _noise_on_rows(start)
        if federation.config.work == "survey":
            more |= engine.survey()
        else:
            engine.run()
        _finish(engine, out, job.local, more)


@dataclass
class FailureLog:
    """Prints silos' failures. Before there is a run folder it keeps the last of each silo, later it writes events."""

    progress: Progress
    folder: RunFolder | None = None
    refusals: dict[str, str] = field(default_factory=dict)

    def __call__(self, sender: str, event: str) -> None:
        """Log one failure of a silo or node."""
        sender, event = sender[:100], event[:500]  # both may quote a silo
        log_line(f"silotune coordinator: {sender}: {event}", sys.stdout)
        waits = event.startswith(WAITS_FOR_APPROVAL)
        if self.folder is not None:
            self.folder.event("silo-waiting" if waits else "silo-failed", silo=sender, reason=event)
        else:
            self.refusals[sender] = event
            self.progress(0, event, 0, 1)


def greet(
    start: RunStart,
    link: Link,
    greeting: Frame,
    admit: Callable[[Frame], None],
    failures: FailureLog,
    status: RunStatus,
    record: Records,
    members: Collection[str] = (),
) -> SiloDispatcher:
    """Wait until all silos are admitted; for silos of an earlier start of the run, only `federation.away` seconds."""
    names, options = start.names, start.config.federation
    dispatcher = SiloDispatcher(
        link, names, greeting, admit, failures, options.patience, status=status, record=record.append
    )
    status.report(0, "waiting for silos to join", 0, len(names))
    absent = dispatcher.wait_for_all(options.join, members, options.away)
    missing = [name for name in absent if name not in members]
    if missing:
        reasons = "".join(f"; {sender}: {event}" for sender, event in sorted(failures.refusals.items()))
        late = f"silos that did not join within federation.join={options.join:g} s: {', '.join(missing)}"
        raise SilotuneError(f"{late}; nothing began{reasons}")
    for name in absent:
        failures(name, f"did not join again within federation.away={options.away:g} s; the run goes on")
    return dispatcher


def _checked_names(job: CoordinatorJob, config: Config) -> list[str]:
    """Check the keys that are the coordinator's own, and return the silos' names in order."""
    set_numerics(config.precision.deterministic, config.precision.tf32)
    if config.aggregation.noise_multiplier is not None and config.privacy.secret is None and not job.local:
        raise InputError(
            "aggregation.noise_multiplier: noise from the run's seed hides nothing from silos, who know the seed; give "
            "privacy.secret=FILE (head -c 32 /dev/urandom > FILE)"
        )
    names = sorted(job.silos or config.federation.silos)
    if config.aggregation.secure:
        require_masks(len(names))
    return names


def _registry(config: Config, out: Path, names: list[str]) -> RunRegistry:
    """Open the registry of a run; refuse other silos than at its start where a privacy guarantee counts them."""
    registry = RunRegistry.open(out)
    members = sorted(registry.silos)
    if config.aggregation.noise_multiplier is not None and members and members != names:
        raise InputError(
            "federation.silos: the privacy guarantee of aggregation.noise_multiplier counts them; it keeps "
            f"{', '.join(members)} until the run ends"
        )
    return registry


def _federation(
    config: Config, method: Method, backbone: Backbone, silos: Mapping[str, SiloInfo], labeled: SiloData | None
) -> Federation:
    """Build the coordinator's side of the federation: silos are known by name and task, their rows are elsewhere."""
    tasks = {name: silo.task for name, silo in silos.items()}
    method.setting.head.check_names(tasks.values())
    check_labels(config, tasks.values())
    check_tasks(config, method, tasks, labeled=None if labeled is None else labeled.task)
    context = build_model(config, method, tasks.values(), backbone)
    members = silos_without_rows(method, tasks)
    coordinator, privacy = build_coordinator(config, context, members, tasks, labeled is not None)
    texts = {name: silo.texts for name, silo in silos.items()}
    server = None if labeled is None else server_silo(context, labeled)
    federation = Federation(config, context, members, coordinator, tasks, texts, server, privacy=privacy)
    without_training(federation)
    return federation


def _labeled(job: CoordinatorJob, config: Config, wanted: bool) -> SiloData | None:
    if not wanted:
        return None
    folder = job.labelled or config.federation.labelled
    if folder is None:
        raise InputError(
            f"federation.labelled: method={config.method.name} trains on the coordinator's own labeled rows; give "
            "their folder"
        )
    return read_rows(Path(folder), "coordinator")


def _noise_on_rows(start: RunStart) -> dict[str, Any]:
    """Return the entry `privacy` of `summary.json`, as far as a coordinator knows it: what the run asked silos for.

    `silos` has how many times the noise for that each silo adds; their own files decide on their budgets.
    """
    own = start.config.privacy
    if own.unit is None:
        return {}
    target = {"epsilon_round": None, "epsilon_total": own.epsilon, "delta": own.delta or DELTA}
    facts = {"participations": start.config.rounds, "silos": start.admission.noise}
    uncovered = {} if own.parts == "all" else {"uncovered": UNCOVERED}
    if own.shares:
        uncovered["assumed"] = SharedNoise.read(start.admission.shares).assumption
    mechanism = "gaussian" if start.config.work == "survey" else RowAccount.mechanism
    return {"privacy": {"mechanism": mechanism, "unit": own.unit, **target, **uncovered, **facts}}


def _finish(engine: FlowerEngine, out: Path, local: bool, noise: dict[str, Any]) -> None:
    federation, folder = engine.federation, engine.folder
    final: dict[str, Any] = {"shared_sha256": digest(flatten(federation.coordinator.shared)), "state_sha256": None}
    folders: dict[str, Path] = {}
    if local:  # the silos' folders are in the run folder
        last = folder.checkpoints.latest()
        for name, file in last.silos.items() if last is not None else ():
            federation.silos[name].state = SiloState.from_flat(folder.checkpoints.read(file))
        final["state_sha256"] = state_digest(federation)
        for silo in federation.silos.values():
            silo.state = None
        folders = {name: folder.checkpoints.path / "silos" / name / engine.run_id for name in federation.silos}
    best = engine.load_best()
    summary = summarize(engine) | {"engine": engine.label, "best_round": best} | final | noise
    if federation.config.work == "survey":  # there is no model
        pass
    elif folders:
        gather_models(out, folders, summary)
    elif not names_with(federation.method.parts(), Scope.PRIVATE):
        write_models(out, federation, summary)
    else:
        write_shared_model(out, federation)
    write_text(out / "summary.json", json.dumps(summary, indent=1) + "\n")


# -- plans: several runs that silos check and approve as one, and that then follow one another -------------------------


def run_plan(job: CoordinatorJob, link: Link, record: Records, status: RunStatus) -> None:
    """Have all runs of a plan checked and approved, and run those that are not finished."""
    load = lru_cache(maxsize=1)(partial(BackboneRequirements.load, on_use=True))  # most runs need the same
    _approve(job, link, record, status, load)
    failed: dict[str, str] = {}
    for name in job.cells:
        cell = job.cell(name)
        if (Path(cell.out) / "summary.json").exists():
            continue
        try:
            with folder_lock(Path(cell.out)):
                run_job(cell, link, record, status, load)
        except ConnectionLost:
            raise
        except SilotuneError as error:
            failed[name] = str(error)
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise SilotuneError(f"{len(failed)} of {len(job.cells)} runs failed, the others are finished: {reasons}")


def _approve(job: CoordinatorJob, link: Link, record: Records, status: RunStatus, load: Load) -> None:
    """Ask all silos for one approval of all runs; then build every run from their answers, before the first trains."""
    starts: dict[str, RunStart] = {}
    for name in job.cells:
        with _named(name):
            starts[name] = RunStart.of(job.cell(name), record, load)
    first, cells = starts[job.cells[0]], [{"name": name, **start.request} for name, start in starts.items()]

    def admit(frame: Frame) -> None:
        hellos = frame.fields.get("hellos")
        kinds = [type(hello) for hello in hellos] if isinstance(hellos, list) else []
        if frame.kind != "planned" or kinds != [dict] * len(starts):
            Hello.read(Frame("refused", frame.fields))  # raises the silo's own reason
        for (name, start), hello in zip(starts.items(), hellos or [], strict=True):
            with _named(name):
                start.admission(Frame("hello", {**hello, "silo": frame.fields.get("silo")}))

    greeting = Frame("plan", {"run": RunRegistry.open(Path(job.out)).run, "cells": cells})
    greet(first, link, greeting, admit, FailureLog(status.report), status, record)
    for name, start in starts.items():
        with _named(name):
            start.federation()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix refusals raised inside the block with the run's name."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{name}: {error}") from error
