"""DP-SGD's clipped sums against autograd unit by unit, in float64: every tuner, encoders and causal models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from silotune.communication.privacy.integer_noise import grid_of
from silotune.communication.privacy.noise import NoiseStream
from silotune.core.tensors import State, flatten
from silotune.data.batching import make_batch
from silotune.methods.step import LocalTraining, Step, local_training
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.federation import Federation
from silotune.training.noised_steps import NoisedSteps
from silotune.training.row_privacy import RowPlan, RowPrivacy, units_of
from silotune.training.silo import Silo
from tests.support.language_models import folder_of
from tests.support.method_cases import of_kinds
from tests.support.proof import RECIPE, TUNER_WORDS, double_backbone, in_double
from tests.support.tiny import BAD, GOOD

TUNERS = [name for name in TUNER_WORDS if name not in ("full", "p-tuning")]
FEW = ("lora", "bottleneck", "prefix")
"""Tuners on causal models in `make test`, one of each kind."""
CLIP = 0.05
TRAINING = LocalTraining(0.1, {}, {})


def federation(config: object, kind: str, folder: Path) -> Federation:
    with in_double():
        return build(config, double_backbone(folder, kind))  # type: ignore[arg-type]


def state_of(made: Federation, silo: Silo) -> tuple[State, State]:
    """All parts of a silo in float64, and the shared ones as received."""
    with in_double():
        shared = made.context.initial.shared([silo])
        state = made.context.model_state(silo, shared)
    draws = torch.Generator().manual_seed(5)
    moved = {
        part: {
            name: tensor.double() + 0.05 * torch.randn(tensor.shape, generator=draws) for name, tensor in own.items()
        }
        for part, own in state.items()
    }
    return moved, {name: {key: tensor.double() for key, tensor in own.items()} for name, own in shared.items()}


def by_hand(made: Federation, silo: Silo, state: State, received: State, drawn: list) -> list[Tensor]:
    """The sum of clipped gradients, one row after the other through plain autograd."""
    context, phase = made.context, made.context.phases[0]
    total: list[Tensor] = []
    for unit in drawn:
        gradient: list[Tensor] = []
        for task, row in unit:
            own = {
                name: {key: t.clone().requires_grad_() for key, t in part.items()} if name in phase.trains else part
                for name, part in state.items()
            }
            leaves = list(flatten({name: own[name] for name in phase.trains}).values())
            rows = silo.train[task]
            width = context.train.max_length  # Llama's softmax is in float32, whose sums follow the width
            batch = make_batch(rows, rows.sequences([row]), context.backbone.pad_id, width=width)
            mixes = {name: context.resolve(mix, own, received, {}) for name, mix in phase.views.items()}
            views = context.program([mixes], training=True)(batch)
            with local_training(TRAINING):
                loss = phase.loss(Step(batch, views, own, received, {}, context.parts, recipe=context.recipe, apart=[]))
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
            each = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
            gradient = [
                a + b / len(unit) for a, b in zip(gradient or [torch.zeros_like(g) for g in each], each, strict=True)
            ]
        norm = torch.sqrt(sum((g.square().sum() for g in gradient), start=torch.zeros((), dtype=torch.float64)))
        factor = min(1.0, CLIP / float(norm))
        total = [
            a + factor * g for a, g in zip(total or [torch.zeros_like(g) for g in gradient], gradient, strict=True)
        ]
    return total


def steps_of(made: Federation, silo: Silo) -> NoisedSteps:
    made.context.row_privacy = RowPrivacy(
        CLIP, 2, {silo.name: RowPlan("row", 1.0, (0, 2), 0.0)}, frozenset({made.context.phases[0].name}), None, 1, ""
    )
    return NoisedSteps(made.context, silo, made.context.phases[0], NoiseStream(b"key"), TRAINING)


def check(made: Federation, unit_size: int = 1) -> None:
    silo = next(iter(made.silos.values()))
    if unit_size > 1:
        train = {
            task: replace(rows, units=[str(row // unit_size) for row in range(len(rows))])
            for task, rows in silo.train.items()
        }
        silo = replace(silo, train=train)
    steps = steps_of(made, silo)
    state, received = state_of(made, silo)
    for number in range(2):
        drawn = list(steps._draw(number))
        assert drawn, "the test's draws have units"
        assert all(len(unit) <= 2 for unit in drawn)
        found = steps.step(number, state, received, {})
        expected = by_hand(made, silo, state, received, drawn)
        size = steps._rate * len(units_of(silo))
        rounding = len(drawn) * (grid_of(CLIP, 0.0) + CLIP * 2**-30)  # of each unit, and the margin of the clipping
        for gradient, wanted in zip(found.gradient.values(), expected, strict=True):
            torch.testing.assert_close(gradient * size, wanted, rtol=1e-10, atol=rounding)


@pytest.mark.parametrize("tuner", of_kinds(TUNERS, [tuner for tuner in TUNERS if tuner not in ("dora", "vera")]))
def test_an_encoder(tuner: str, tiny_config: Callable, backbone_folder: Callable[[str], Path]) -> None:
    config = tiny_config("fedavg", *RECIPE, f"tuner={tuner}", *TUNER_WORDS[tuner], "train.batch_size=12")
    check(federation(config, "AutoModel", backbone_folder("bert")), unit_size=3)


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_row_that_overflows_spoils_no_other(tuner, tiny_config, backbone_folder):
    config = tiny_config("fedavg", *RECIPE, f"tuner={tuner}", *TUNER_WORDS[tuner])
    made = federation(config, "AutoModel", backbone_folder("bert"))
    silo = next(iter(made.silos.values()))
    ((task, rows),) = silo.train.items()
    others = {token for row in (0, 1, 3, 4) for token in rows.ids[row]}
    token = next(token for token in rows.ids[2] if token not in others)
    steps, (state, received) = steps_of(made, silo), state_of(made, silo)
    found, embeddings = [], made.backbone.word_embeddings.data
    kept = embeddings[token].clone()
    for value in (kept, torch.inf):
        embeddings[token] = value
        at_once = range(5) if steps._at_once > 1 else ()
        pieces = [at_once] if at_once else [[row] for row in range(5)]
        found.append(
            [steps._row_gradients(0, 0, [(task, row) for row in piece], state, received, {}) for piece in pieces]
        )
    embeddings[token] = kept  # other tests have the same backbone
    for before, after in zip(*found, strict=True):
        for one, two in zip(before[0], after[0], strict=True):
            finite = two.isfinite().flatten(1).all(1)
            torch.testing.assert_close(one[finite], two[finite], rtol=1e-10, atol=1e-12)
            assert int((~finite).sum()) <= 1
    assert not all(tensor.isfinite().all() for piece in found[1] for tensor in piece[0])


@pytest.mark.parametrize(
    ("tuner", "head"),
    [
        pytest.param(tuner, head, marks=() if tuner in FEW and (head == "lm" or tuner == "lora") else pytest.mark.long)
        for tuner in TUNERS
        for head in ("lm", "linear")
        if tuner != "bitfit"  # Llama has no biases
    ],
)
def test_a_causal_model(tuner, head, tmp_path, tmp_path_factory):
    folder, data = folder_of("llama", tmp_path_factory.getbasetemp()), tmp_path / "rows.jsonl"
    rows = [
        {"text": f"the garden was {GOOD[n % 6]}", "answer": f"{BAD[n % 5]} {'again ' * (n % 4)}"} for n in range(24)
    ]
    rows = [row if head == "lm" else row | {"answer": ("no", "yes")[n % 2]} for n, row in enumerate(rows)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = "generation" if head == "lm" else "classification"
    own = {"name": "n", "path": str(data), "text": "text", "label": "answer", "kind": kind}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"silos": [own, own | {"name": "m"}]}))
    words = ("method=fedavg", f"tuner={tuner}", *TUNER_WORDS[tuner], f"head={head}", f"backbone={folder}", *RECIPE)
    pooling = () if head == "lm" else ("head.pooling=mean",)
    config = read_config(str(tmp_path / "own.yaml"), [*words, *pooling, "train.batch_size=12", "train.max_length=96"])
    check(federation(config, "AutoModelForCausalLM" if head == "lm" else "AutoModel", folder))
