"""Every method as a case, short runs of cases, and the messages that pass between silos and coordinator.

A new method joins by its entry in `silotune.methods.METHODS`, a new case of a method by an entry of `CASES`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from safetensors.torch import load
from torch import Tensor

from silotune.config import Config
from silotune.methods import METHODS, Method, Setting
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import load_backbone
from silotune.models.heads import HEADS
from silotune.models.tuners import TUNERS
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.runs.run_result import Run
from silotune.training.client import SiloClient, SiloReply
from silotune.training.context import TrainingContext
from silotune.training.coordinator import Coordinator
from silotune.training.local_trainer import LocalTrainer
from silotune.training.silo_round import LocalResult
from tests.support.tiny import UNPARTITIONED, tiny_overrides, write_data

TRAIN_ROWS = {"alpha": 10, "beta": 18, "gamma": 14}
"""Unequal, so that weights by rows differ from uniform ones, and not all multiples of the batch size."""
ONE_TASK_ROWS = {"east": 10, "north": 18, "west": 14}
TEST_ROWS = 15
BATCH = 10
ROUNDS = 2


@dataclass(frozen=True)
class Case:
    """A method and further settings. With `one_task` all silos hold one task, so that a head may be shared.

    With `rows` that task is one of entities (`marked`) or retrieval (`asked`).
    """

    method: str
    overrides: tuple[str, ...] = ()
    one_task: bool = False
    rows: str = ""

    @property
    def plain(self) -> Method:
        """The method over LoRA and a classifier of two layers, to read what it declares."""
        return METHODS[self.method](Setting(TUNERS["lora"](), HEADS["mlp"]()))

    @property
    def ends(self) -> bool:
        """Whether the method has a final phase, before which silos' models are not finished."""
        return any(phase.when == "end" for phase in self.plain.phases())

    @property
    def adopts_the_mean(self) -> bool:
        """Whether the coordinator adopts the mean of the updates without a step of its own."""
        trains = METHODS[self.method].server_phases is not Method.server_phases
        brought = METHODS[self.method].defaults
        means = brought.get("aggregation", "samples") in ("samples", "uniform") and "server.optimizer" not in brought
        chosen = any(word.startswith(("aggregation=", "server.optimizer")) for word in self.overrides)
        return means and not trains and not chosen and not self.plain.aggregations_of_parts


_SEMI_SUPERVISED = (*UNPARTITIONED, "server.labels_per_class=4", "head=linear")
_RANKS = ("tuner=lora", "tuner.r=5", "tuner.ranks.beta=2", "tuner.ranks.gamma=3")
_WINDOWS = ("train.max_length=8", "data.long_texts=windows", "data.windows_per_row=1")
RANKED = {
    "flexlora": (),
    "hetlora": (),
    "flora": (),
    "rolora": ("aggregation=flexlora",),
    "fedsvd": ("aggregation=flexlora",),
    "apfl": ("aggregation=hetlora",),
    "pfedme": ("aggregation=flexlora", "method.eta=0.05"),
    "fdlora": ("aggregation=hetlora",),
    "moon": ("aggregation=hetlora", "method.adapters=1"),
    "feddpa-t": ("aggregation=flexlora",),
}
"""Methods whose silos have LoRA ranks of their own, one of each kind, with what else they need."""


CASES: dict[str, Case] = {name: Case(name) for name in METHODS} | {
    "fedavg, shared head": Case("fedavg", ("head.scope=shared", "tuner=lora", "method.adapters=1"), one_task=True),
    "fedmcp, shared heads": Case("fedmcp", ("head.scope=shared",), one_task=True),
    "fedmcp, entities": Case("fedmcp", ("head=entities", "data.labels=[PER,LOC]"), one_task=True, rows="marked"),
    "fedmcp, retrieval": Case("fedmcp", ("head=retrieval",), one_task=True, rows="asked"),
    "fedmcp, windows": Case("fedmcp", _WINDOWS, one_task=True),
    "fedavg, entities in windows": Case(
        "fedavg",
        ("head=entities", "data.labels=[PER,LOC]", *_WINDOWS, "method.adapters=1"),
        one_task=True,
        rows="marked",
    ),
    "fedmcp, full": Case("fedmcp", ("tuner=full",)),
    "fedfame": Case("fedfame", _SEMI_SUPERVISED, one_task=True),
    "fedavg-server": Case("fedavg-server", _SEMI_SUPERVISED, one_task=True),
    "fedproto": Case("fedproto", UNPARTITIONED, one_task=True),
    "ifca": Case("ifca", UNPARTITIONED, one_task=True),
    "server-only": Case("server-only", _SEMI_SUPERVISED, one_task=True),
    "feddpa-t, dropout": Case("feddpa-t", ("tuner=lora", "tuner.dropout=0.3")),
    "fedavg, dora": Case(
        "fedavg",
        (
            *("tuner=dora", "tuner.init=pissa", "tuner.scaling=rslora", "tuner.lr_ratio=4", "method.adapters=1"),
            *("tuner.r=4", "train.optimizer=adamw", "train.weight_decay=0.1", "train.keep_optimizer=true"),
        ),
    ),
    "fedavg, whole recipe": Case(
        "fedavg",
        (
            *("train.optimizer=adamw", "train.schedule=linear", "train.schedule_over=run", "train.warmup=0.2"),
            *("train.weight_decay=0.1", "train.clip_norm=0.5", "train.dropout=own", "train.keep_optimizer=true"),
            *("train.label_smoothing=0.1", "train.class_weights=balanced", "method.adapters=1"),
        ),
    ),
    "fedavg, q-fedavg": Case("fedavg", ("aggregation=q-fedavg",)),
    "fedavg, afl": Case("fedavg", ("aggregation=afl", "aggregation.mixture_lr=0.5")),
    "fedavg, server adam": Case("fedavg", ("server.optimizer=adam", "server.lr=0.01")),
    **{f"{name}, ranks": Case(name, (*_RANKS, *more)) for name, more in RANKED.items()},
    "hetlora, pruned ranks": Case("hetlora", (*_RANKS, "method.prune=0.5", "method.penalty=0.1", "train.lr=0.05")),
}

KINDS = (
    *("scaffold", "ffa-lora", "rolora", "apfl", "pfedme", "flora, ranks", "fdlora", "feddpa-t, dropout"),
    *("la-lora", "fedfame", "server-only", "fedmcp, entities", "fedmcp, retrieval", "ifca"),
)
"""The cases of `make test`, which together declare all that a method can (`tests/methods/test_kinds.py`).

An aggregation of a part's own; fixed parts; learned weights, and constants of trained parts; several steps on a batch,
and parts that take turns; ranks, and parts that are redrawn; a final phase, and rounds of several kinds, odd and even;
weights of each text; a phase of the server, and a memory; rows of one party; private parts with anchors, whose loss
couples rows, under heads that read positions or couple them, too; parts that are gathered, and a number that the
aggregation reads, with its state. The other cases run in `make test-all`.
"""


def of_kinds(names: Iterable[str], short: Collection[str]) -> list[ParameterSet]:
    """Return names as parameters of a suite; `make test-all` alone runs those that are not in `short`."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long, id=name) for name in names]


KINDS_OF_METHODS = tuple(CASES[kind].method for kind in KINDS)
every_case = pytest.mark.parametrize("case", of_kinds(CASES, KINDS))
every_method = pytest.mark.parametrize("method", of_kinds(METHODS, KINDS_OF_METHODS))


def write_silos(folder: Path) -> Path:
    """`unlike/`: three tasks with unequal numbers of rows; `alike/`: one task in three silos, `marked/` with spans,
    `asked/` with passages."""
    for task, rows in TRAIN_ROWS.items():
        write_data(folder / "unlike", [task], {"train": rows, "validation": 9, "test": TEST_ROWS})
    for seed, (silo, rows) in enumerate(ONE_TASK_ROWS.items()):
        splits = {"train": rows, "validation": 9, "test": TEST_ROWS}
        written = write_data(folder / f"seed{seed}", ["alpha"], splits, seed) / "alpha"
        (folder / "alike").mkdir(exist_ok=True)
        written.rename(folder / "alike" / silo)
        for kind in ("marked", "asked"):
            (folder / kind / silo).mkdir(parents=True)
        for path in (folder / "alike" / silo).glob("*.jsonl"):
            texts = [json.loads(line)["sentence1"].split() for line in path.read_text(encoding="utf-8").splitlines()]
            tags = (["B-PER", "I-PER", *["O"] * (len(words) - 3), "B-LOC"] for words in texts)
            rows = [{"tokens": words, "tags": own} for words, own in zip(texts, tags, strict=True)]
            (folder / "marked" / silo / path.name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
            texts = texts[:10] if path.stem == "test" else texts  # so that silos fit into one forward
            rows = [{"query": " ".join(words[1:4]), "passage": " ".join(words)} for words in texts]
            (folder / "asked" / silo / path.name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


@dataclass
class Wire:
    """All messages of a run, and the results of the local rounds that they were made from."""

    up: list[tuple[int, str, bytes]] = field(default_factory=list)
    down: list[bytes] = field(default_factory=list)
    results: dict[tuple[int, str], LocalResult] = field(default_factory=dict)
    final: list[bytes] = field(default_factory=list)
    """The broadcasts that opened silos' final phases, of methods that have any."""
    final_results: dict[str, LocalResult] = field(default_factory=dict)

    def updates(self, number: int) -> dict[str, bytes]:
        return {silo: message for when, silo, message in self.up if when == number}


Tamper = Callable[[int, str, bytes], bytes]
Spoil = Callable[[LocalResult, TrainingContext], None]


@contextmanager
def tapped(tamper: Tamper | None = None, spoil: Spoil | None = None) -> Iterator[Wire]:
    """Record every message while the block runs.

    Args:
        tamper: what happens to an update on its way; the recorded one is what arrives.
        spoil: what happens to a local round's result before a message is made of it.
    """
    wire = Wire()
    receive, opened, closed = Coordinator.receive, SiloClient.rounds, SiloClient.finals
    rounds, finals = LocalTrainer.rounds, LocalTrainer.finals

    def tapped_receive(self: Coordinator, number: int, silo: str, message: bytes) -> object:
        if tamper is not None:
            message = tamper(number, silo, message)
        wire.up.append((number, silo, bytes(message)))
        return receive(self, number, silo, message)

    def tapped_opening(self: SiloClient, silos: Any, broadcast: bytes, *args: Any) -> list[SiloReply]:
        wire.down += [bytes(broadcast)] * len(silos)
        return opened(self, silos, broadcast, *args)

    def tapped_closing(self: SiloClient, silos: Any, broadcast: bytes) -> list[SiloReply]:
        wire.final += [bytes(broadcast)] * len(silos)
        return closed(self, silos, broadcast)

    def tapped_rounds(self: LocalTrainer, silos: Any, shared: Any, number: int) -> list[LocalResult]:
        results = rounds(self, silos, shared, number)
        for silo, result in zip(silos, results, strict=True):
            if spoil is not None:
                spoil(result, self.context)
            wire.results.setdefault((number, silo.name), result)
        return results

    def tapped_finals(self: LocalTrainer, silos: Any, shared: Any, number: int) -> list[LocalResult]:
        results = finals(self, silos, shared, number)
        wire.final_results |= {silo.name: result for silo, result in zip(silos, results, strict=True)}
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "receive", tapped_receive)
        patch.setattr(SiloClient, "rounds", tapped_opening)
        patch.setattr(SiloClient, "finals", tapped_closing)
        patch.setattr(LocalTrainer, "rounds", tapped_rounds)
        patch.setattr(LocalTrainer, "finals", tapped_finals)
        yield wire


def read_message(message: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a message's tensors and header with safetensors and json alone."""
    length = int.from_bytes(message[:8], "little")
    return load(message), json.loads(message[8 : 8 + length])


class Federate:
    """Runner of cases over one loaded tiny backbone."""

    def __init__(self, silos: Path, backbone: Path) -> None:
        self._silos = silos
        self._folder = backbone
        self._references: dict[str, tuple[Run, Wire]] = {}
        self.backbone: Backbone = load_backbone(str(backbone), precision="fp32", keep_master=True)

    def words(self, case: str, *overrides: str) -> list[str]:
        """Return the case's `key=value` words for the preset `demo`."""
        chosen = CASES[case]
        rows, data = (ONE_TASK_ROWS, "alike") if chosen.one_task else (TRAIN_ROWS, "unlike")
        data = chosen.rows or data
        return [
            *tiny_overrides(chosen.method, self._folder, self._silos / data),
            f"data.tasks=[{','.join(rows)}]",
            "data.seed=5",
            *(["data.task=alpha"] if chosen.one_task else []),
            f"train.batch_size={BATCH}",
            f"rounds={ROUNDS}",
            "evaluation.bootstrap=0",
            *chosen.overrides,
            *overrides,
        ]

    def config(self, case: str, *overrides: str) -> Config:
        return read_config("demo", self.words(case, *overrides))

    def run(self, case: str, out: Path, *overrides: str, **more: Any) -> Run:
        """Run a case; `more` goes to `silotune.run` (`resume`, `progress`, `workers`)."""
        return run(self.config(case, *overrides), out=out, backbone=self.backbone, **more)

    def reference(self, case: str, root: Path) -> tuple[Run, Wire]:
        """Return a finished run of the case and its messages; it is made once, so tests must not change it."""
        if case not in self._references:
            with tapped() as wire:
                self._references[case] = self.run(case, root / f"reference-{len(self._references)}"), wire
        return self._references[case]


SAME_ON_RESUME = ("state_sha256", "shared_sha256", "silos", "average", "best_round", "bytes_up", "bytes_down")


def same(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a summary that depend neither on interruptions, nor on the order of silos, nor on time."""
    return {key: summary[key] for key in SAME_ON_RESUME}


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """Map each path below a folder to (time of change, hash of its bytes); folders to (0, "")."""
    return {
        path.relative_to(folder).as_posix(): (
            (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) if path.is_file() else (0, "")
        )
        for path in sorted(folder.rglob("*"))
    }


def logged(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Read the events of one kind as plain JSON lines."""
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def timeless(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without what depends on the clock."""
    return {key: value for key, value in event.items() if key not in ("seconds", "time")}


def assert_as_if_never_interrupted(resumed: Run, whole: Run) -> None:
    """Compare a resumed run with an uninterrupted one: summary, events without times, checkpoint files."""
    assert same(resumed.summary) == same(whole.summary)
    assert json.loads((resumed.folder / "summary.json").read_text()) == resumed.summary
    for kind in ("round", "silo", "final"):  # each piece of work is logged once, with the same numbers
        without_times = [[timeless(event) for event in logged(run.folder, kind)] for run in (resumed, whole)]
        assert without_times[0] == without_times[1]
    files = [
        {name: value[1] for name, value in snapshot(run.folder / "checkpoints").items()} for run in (resumed, whole)
    ]
    assert files[0].keys() == files[1].keys()
    kinds = (".safetensors", ".states")
    tensors = [{name: value for name, value in hashes.items() if name.endswith(kinds)} for hashes in files]
    assert tensors[0] == tensors[1]
