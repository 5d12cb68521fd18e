"""What a refactoring must leave as it is: final states of every method under every tuner, messages, tables of reports.

Every case of a method is a run of two rounds of two silos by plain SGD, in float64 over the recorded tiny BERT, through
`silotune.run`. `in_double`, `double_backbone`, `final_state`, `messages` and `tables` are all that reaches below the
public names.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import silotune
from silotune.communication.messages import Expected, broadcast_message, change_message, update_message
from silotune.communication.uplink import make_pipeline
from silotune.config.uplink import UplinkConfig
from silotune.lab.report.entries import read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.table_files import write_tables
from silotune.methods import METHODS, Part, Scope
from silotune.models.backbone.loading import load_backbone
from silotune.models.tuners.vera import VeRA
from silotune.training.initial_parts import InitialParts
from tests.support.method_cases import KINDS_OF_METHODS
from tests.support.old_runs import FIXTURES, TINY, put_in_place

PROOF = FIXTURES / "proof"
STATES, MESSAGES, TABLES = PROOF / "states.json", PROOF / "messages.json", PROOF / "tables"

TUNER_WORDS = {
    "bottleneck": ("tuner.r=2",),
    "lora": ("tuner.r=2",),
    "dora": ("tuner.r=2",),
    "vera": ("tuner.r=3",),
    "prefix": ("tuner.tokens=2", "tuner.reparametrise=3", "tuner.width=4"),
    "prompt": ("tuner.tokens=2",),
    "p-tuning": ("tuner.tokens=2", "tuner.width=3"),
    "ia3": (),
    "bitfit": (),
    "full": (),
}
"""Every built-in tuner with the words that make it small."""

REPRESENTATIVE = ("fedavg", "fedmcp", "feddpa-t")
"""Methods that `make test` runs under every tuner."""

ONE_TASK = ("fedfame", "server-only", "fedavg-server")
"""Methods that share a head and have labeled rows at the coordinator."""

LABEL_WORDS = "head.words={bad: awful, good: great, other: cold, same: kind}"

RECIPE = (
    *("precision=fp32", "threads=1", "rounds=2", "per_method={}", "data.merge=false", "data.validation_rows=0"),
    *("train.optimizer=sgd", "train.lr=0.2", "train.steps=2", "train.batch_size=4", "train.max_length=32"),
    *("evaluation.bootstrap=0", "evaluation.baselines=false", "evaluation.predictions=false"),
)


def default_tuner(method: str) -> str:
    """Return the tuner of a method's first case."""
    return str(METHODS[method].defaults.get("tuner", "bottleneck"))


def accepted(method: str) -> list[str]:
    """Return the built-in tuners that a method is defined for."""
    if "tuner" in METHODS[method].defaults and METHODS[method].defaults["tuner"] == "full":
        return ["full"]
    return [tuner for tuner in TUNER_WORDS if METHODS[method].tuners is None or tuner in (METHODS[method].tuners or ())]


CASES = {f"{method} {tuner}": (method, tuner) for method in METHODS for tuner in accepted(method)}
"""Name → method and tuner."""

SHORT = [
    name
    for name, (method, tuner) in CASES.items()
    if method == "fedmcp" or (method in KINDS_OF_METHODS and tuner == default_tuner(method))
]


@contextmanager
def in_double() -> Iterator[None]:
    """Let parts be drawn and sent in float64 inside the block: initial values, too, are then equal on all machines."""
    one, redrawn, matrices = InitialParts._one, InitialParts.redrawn, VeRA._matrices

    def drawn(draw: Callable[[], Any]) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return draw()
        finally:
            torch.set_default_dtype(before)

    def doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.double() for name, tensor in tensors.items()}

    def redrawn_in_double(*args: Any) -> dict[str, dict[str, Tensor]]:
        return {part: doubled(tensors) for part, tensors in drawn(lambda: redrawn(*args)).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Expected, "dtype", lambda *_: torch.float64)
        patch.setattr(InitialParts, "_one", lambda *args: doubled(drawn(lambda: one(*args))))
        patch.setattr(InitialParts, "redrawn", redrawn_in_double)
        patch.setattr(VeRA, "_matrices", lambda *args: drawn(lambda: matrices(*args)))
        yield


@cache
def double_backbone(folder: Path, kind: str) -> Any:
    """Load the recorded BERT in float64 and without dropout, with or without its language-model head."""
    backbone = load_backbone(str(folder), precision="fp32", keep_master=True, model_class=kind)  # type: ignore[arg-type]
    backbone.model.double()
    for module in backbone.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return backbone


def final_state(run: silotune.Run) -> dict[str, Tensor]:
    """Return the tensors of shared parts, server, private parts and memory at a run's best round."""
    federation = run.federation
    state = dict(federation.coordinator.flat())
    for name, silo in federation.silos.items():
        state |= {f"silo/{name}/{key}": tensor for key, tensor in federation.context.state_of(silo).flat().items()}
    return dict(sorted(state.items()))


def write_inputs(root: Path) -> Path:
    """Copy the recorded BERT, beside which a digest is kept, and the first rows of two tasks, unequally many."""
    shutil.copytree(TINY / "bert", root / "bert")
    for task, rows in (("alpha", 9), ("beta", 6)):
        (root / "data" / task).mkdir(parents=True)
        (root / "data" / task / "meta.json").write_text((TINY / "data" / task / "meta.json").read_text())
        for split, count in (("train", rows), ("test", 2)):
            lines = (TINY / "data" / task / f"{split}.jsonl").read_text().splitlines(keepends=True)
            (root / "data" / task / f"{split}.jsonl").write_text("".join(lines[:count]))
    return root


def words(name: str, root: Path) -> list[str]:
    method, tuner = CASES[name]
    tasks = ["alpha"] if method in ONE_TASK else ["alpha", "beta"]
    one_task = ("partition=iid", "partition.silos=2", "server.labels_per_class=2", "head=linear")
    head = ("head=verbalizer", LABEL_WORDS) if method == "fedprompt" else ("head=mlp",)
    return [
        *(
            f"method={method}",
            f"backbone={root / 'bert'}",
            f"data.path={root / 'data'}",
            f"data.tasks=[{','.join(tasks)}]",
        ),
        *RECIPE,
        *(f"tuner={tuner}", *TUNER_WORDS[tuner]),
        *(one_task if method in ONE_TASK else head),
    ]


def run_case(name: str, root: Path, out: Path, *more: str) -> tuple[dict[str, Tensor], str]:
    """Run a case; return its final state and the state's digest."""
    kind = "AutoModelForMaskedLM" if CASES[name][0] == "fedprompt" else "AutoModel"
    with in_double():
        run = silotune.run("demo", *words(name, root), *more, out=out, backbone=double_backbone(root / "bert", kind))
        assert run.summary["best_round"] == run.summary["rounds"]
        return final_state(run), run.summary["state_sha256"]


def numbers(tensor: Tensor) -> tuple[float, float]:
    """Return a tensor's sum and its projection on cosines, in which the order of its numbers shows."""
    flat = tensor.detach().double().reshape(-1).numpy()
    return math.fsum(flat), math.fsum(flat * np.cos(0.7 * np.arange(1, len(flat) + 1)))


def assert_recorded(
    state: Mapping[str, Tensor],
    recorded: Mapping[str, Sequence[float]],
    relative: float = 1e-9,
    absolute: float = 1e-13,
) -> None:
    """Compare every tensor with its recorded sum and projection, relative to the tensor's norm."""
    assert sorted(state) == sorted(recorded)
    far = {}
    for name, tensor in state.items():
        bound = absolute + relative * float(tensor.double().norm())
        found = numbers(tensor)
        if not all(abs(a - b) <= bound + relative * abs(b) for a, b in zip(found, recorded[name], strict=True)):
            far[name] = found, recorded[name]
    assert not far


# -- messages ----------------------------------------------------------------------------------------------------------

UPLINKS = (
    *("none", "fp16", "int8", "int8,rounding=stochastic", "int4", "int4,rounding=stochastic"),
    *("topk,fraction=0.2", "topk,fraction=0.2,values=int8", "randomk,fraction=0.2", "randomk,fraction=0.2,values=fp16"),
    "randomk,fraction=0.2,unbiased=true",
)
"""A codec, and further keys of the section `uplink`."""


def made_tensors(offset: int) -> dict[str, Tensor]:
    """Return three tensors of a shared part, whose numbers are multiples of 1/64."""
    shapes = {"down.weight": (3, 8), "down.bias": (3,), "up.weight": (8, 5)}
    tensors = {}
    for position, (name, shape) in enumerate(shapes.items()):
        index = torch.arange(math.prod(shape))
        tensors[name] = (((37 * index + 11 * position + offset) % 101 - 50) / 64).reshape(shape)
    return tensors


def messages(uplink: str) -> tuple[bytes, bytes]:
    """Return the broadcast that opens round 3 and a silo's update of it, through an uplink."""
    codec, *options = uplink.split(",")
    section = UplinkConfig.model_validate(dict([("name", codec), *(option.split("=") for option in options)]))
    before, after = {"global": made_tensors(0)}, {"global": made_tensors(17)}
    pipeline = make_pipeline(section, seed=5)
    down = broadcast_message(before, 3)
    if codec == "none":
        parts: Any = {"global": Part(cast("Any", None), Scope.SHARED)}
        return down, update_message(after, parts, 3, "alpha", 40)
    change = {f"global/{name}": after["global"][name] - tensor for name, tensor in before["global"].items()}
    written, _ = pipeline.send(change, {}, "alpha", 3)
    return down, change_message(written, pipeline.label, 3, "alpha", 40)


def summary_of(message: bytes) -> dict[str, Any]:
    return {"bytes": len(message), "sha256": hashlib.sha256(message).hexdigest()}


# -- tables ------------------------------------------------------------------------------------------------------------

REPORTED = ("fedavg", "fedmcp")
"""Methods whose finished runs are reported on; of their folders the files are recorded that are text."""


def tables(root: Path) -> dict[str, str]:
    """Put the recorded runs in place below `root` and write a report's tables on them; return file name → content."""
    put_in_place(root, TABLES)
    out = root / "written"
    out.mkdir()
    paths = write_tables(Results(read_entries([root / method for method in REPORTED])), out)
    return {path.name: path.read_text(encoding="utf-8") for path in paths}
