"""Train silos in several processes (`--workers`, or an engine of a cluster) and get the same bits as in one.

Each process has the silos' rows and a backbone, which it loads itself; weights in files of the type that is computed in
are mapped, and in memory once. The main process keeps the silos' states, sends them with the work, and has no weights
on a device meanwhile. A silo's result depends neither on the process nor on the order, so the bits are those of one
process at equal `threads`.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from typing_extensions import override

from silotune.communication.messages import read_broadcast
from silotune.config import Config, dump
from silotune.core.determinism import set_numerics
from silotune.core.serialization import read_tensors, tensor_bytes
from silotune.core.workers import Workers
from silotune.errors import InputError
from silotune.evaluation.federation_scores import (
    Split,
    all_share_one_model,
    measure_silos,
    scored_together,
    weighed_by_silo,
)
from silotune.evaluation.personalization import TestTime, measure_on_every_task, score_test_time
from silotune.evaluation.predict import Measured
from silotune.runs.build.builder import build
from silotune.runs.engines.base import Broadcast, Progress
from silotune.runs.engines.in_process import InProcessEngine, Replies, Training, named
from silotune.runs.storage.run_folder import RunFolder
from silotune.training.client import SiloReply
from silotune.training.federation import Federation
from silotune.training.silo import Silo, SiloState

Kind = Training | Split | Literal["every task"]
"""Kinds of work: training, or scores on a silo's own rows or on every task's test rows."""

IMPORTS = (__name__, "transformers.modeling_utils")
"""What the processes of a run import; the second one is most of what a backbone's own module takes."""

_AHEAD = 2
"""Jobs queued per process: enough that none waits for the main process, few enough that few states are in transit."""


@dataclass(frozen=True)
class SiloJob:
    """A job for a worker process; precision and threads of its configuration are resolved."""

    kind: Kind
    config: Config
    fingerprint: str  # of the backbone in the main process
    broadcast: bytes  # with the shared parts: for these silos, or for scores as the coordinator has them
    silos: tuple[tuple[str, bytes], ...]
    """Names and states (safetensors; empty before the first participation) of silos that train together."""


Trained = list[tuple[SiloReply, bytes]]
"""Replies, and the silos' new states."""


class MultiProcessEngine(InProcessEngine):
    """Trains as `InProcessEngine`, in several processes."""

    def __init__(
        self, federation: Federation, folder: RunFolder, progress: Progress | None = None, workers: int | Workers = 2
    ) -> None:
        super().__init__(federation, folder, progress)
        self._workers = Workers.of(workers)
        self.workers = self._workers.number
        if len(federation.backbone.block_devices.all) > 1:
            raise InputError(
                f"workers={self.workers}: backbone.device_map takes all devices for one process; allowed: 1"
            )
        self._tokens = {name: tokens(silo) for name, silo in federation.silos.items()}
        self._pool: Executor | None = None

    @override
    @contextmanager
    def working(self) -> Iterator[None]:
        with self._workers.pool(IMPORTS, self.federation.config.threads) as (self._pool, self.workers):
            yield

    def _train(
        self, kind: Training, round_number: int, silos: Sequence[str], broadcast: Broadcast
    ) -> Iterator[Replies]:
        done = 0
        together = [names for _, names in self._cohorts(silos)]
        for names, trained in self._spread(kind, together, broadcast):
            self.progress(round_number, named(names, kind), done, len(silos))
            done += len(names)
            for answer, state in trained:
                self.federation.silos[answer.silo].state = _read(state).compact()
            yield [answer for answer, _ in trained]

    @override
    def _measure(self, split: Split, round_number: int) -> dict[str, Measured]:
        groups = scored_together(self.federation, split)
        if any(len(names) > 1 and self._broadcast_by_name(names[0]) for names in groups):  # a job has one broadcast
            return super()._measure(split, round_number)
        rows = {name: rows.key for silo in self.federation.silos.values() for name, rows in silo.evaluations.items()}
        # one model on the same rows is measured once
        once = len({*rows.values()}) == 1 and all_share_one_model(self.federation)
        measured = self._scored(split, [groups[0][:1]] if once else groups, round_number)
        first = next(iter(measured.values()))
        return weighed_by_silo(self.federation, split, {name: measured.get(name, first) for name in rows})

    @override
    def _test_time(self, round_number: int) -> TestTime:
        silos = list(self.federation.silos)
        once = all_share_one_model(self.federation)
        measured = self._scored("every task", [[name] for name in silos[: 1 if once else None]], round_number)
        first = next(iter(measured.values()))
        return score_test_time(self.federation, {name: measured.get(name, first) for name in silos})

    def _scored(self, kind: Split | Literal["every task"], groups: Sequence[Sequence[str]], round_number: int) -> Any:
        """Measure these silos' models in the processes; returns what the function of this kind returns."""

        def adopted(name: str) -> bytes:  # the worker cuts to ranks; it does not have what makes silos' own tensors
            own = name if self._broadcast_by_name(name) else None
            return self.federation.coordinator.broadcast(round_number, own)

        return {
            name: each
            for _, result in self._spread(kind, groups, adopted)
            for name, each in pickle.loads(result).items()
        }

    def _broadcast_by_name(self, silo: str) -> bool:
        """Return whether a silo's shared parts are its own."""
        return self.federation.coordinator.broadcasts.key(silo) == silo

    def _spread(
        self, kind: Kind, groups: Sequence[Sequence[str]], broadcast: Broadcast
    ) -> Iterator[tuple[Sequence[str], Any]]:
        """Yield each group of silos with its job's result, in any order."""
        assert self._pool is not None, "processes live while the engine is working"
        federation = self.federation
        federation.backbone.rest()
        waiting: dict[Future[Any], Sequence[str]] = {}
        queue = deque(sorted(groups, key=lambda names: (-sum(self._tokens[name] for name in names), names)))
        while queue or waiting:
            while queue and len(waiting) < _AHEAD * self.workers:
                names = queue.popleft()
                states = tuple((name, _written(federation.silos[name].state)) for name in names)
                job = SiloJob(kind, federation.config, federation.backbone.fingerprint, broadcast(names[0]), states)
                waiting[self._pool.submit(run_job, job)] = names
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()


def tokens(silo: Silo) -> int:
    """Return the number of tokens in all training rows: the cost of a silo's round is about in proportion."""
    return sum(len(ids) for rows in silo.train.values() for ids in rows.ids)


def _written(state: SiloState | None) -> bytes:
    """Return a state as bytes; empty before the first participation."""
    return b"" if state is None else tensor_bytes(state.flat())


def _read(content: bytes) -> SiloState:
    return SiloState.from_flat(read_tensors(content))


# -- in a worker -------------------------------------------------------------------------------------------------------


_federations: dict[str, Federation] = {}
"""The configuration's text → the federation built from it, for the last configuration."""


def run_job(job: SiloJob) -> Trained | bytes:
    """Do a job in a worker process, over its own backbone; returns what was trained, or what was measured.

    That is pickled here: the pool would send each of its tensors as a file in shared memory.
    """
    text = dump(job.config)
    if text not in _federations:
        _federations.clear()
        set_numerics(job.config.precision.deterministic, job.config.precision.tf32)
        _federations[text] = build(job.config)
    federation = _federations[text]
    if federation.backbone.fingerprint != job.fingerprint:
        raise InputError(f"--workers: {job.config.backbone.name!r} is not the backbone that the run has; allowed: 1")
    silos = [federation.silos[name] for name, _ in job.silos]
    for silo, (_, state) in zip(silos, job.silos, strict=True):
        silo.state = _read(state) if state else None
    try:
        if job.kind in ("validation", "test", "every task"):
            shared, _ = read_broadcast(job.broadcast, federation.coordinator.expected)
            federation.coordinator.adopt(shared)
            some = {silo.name: silo for silo in silos}
            if job.kind == "every task":
                return pickle.dumps(measure_on_every_task(federation, some))
            return pickle.dumps(measure_silos(replace(federation, silos=some), job.kind))
        client = federation.client()
        train = client.rounds if job.kind == "round" else client.finals
        replies = train(silos, job.broadcast)
        return [(reply, _written(silo.state)) for reply, silo in zip(replies, silos, strict=True)]
    finally:
        for silo in silos:
            silo.state = None  # the main process keeps it
