"""A row's gradient has the same bits whoever shares its step: others changed, made long, or emptied; over tuners."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from silotune.communication.privacy.noise import NoiseStream
from silotune.data.tokenized import TokenizedRows
from silotune.methods.step import LocalTraining
from silotune.runs.build.builder import build
from silotune.training import noised_steps
from silotune.training.federation import Federation
from silotune.training.noised_steps import NoisedSteps
from silotune.training.row_privacy import RowPlan, RowPrivacy
from silotune.training.silo import Silo
from tests.support.proof import TUNER_WORDS

TUNERS = [name for name in TUNER_WORDS if name not in ("full", "p-tuning")]
LENGTH = 32
UNITS = 11
KEPT = ("cache=frozen-prefix", "tuner.blocks=last:1")
"""What lies below the adapters is kept, of each row computed alone."""


def vectors_of(made: Federation, silo: Silo) -> Tensor:
    """Each unit's gradient of one step that draws all, shape (units, numbers)."""
    context = made.context
    phase = context.phases[0]
    plans = {silo.name: RowPlan("row", 1.0, (0, 1), 0.0)}
    context.row_privacy = RowPrivacy(1e6, 2, plans, frozenset({phase.name}), None, 1, "")
    steps = NoisedSteps(context, silo, phase, NoiseStream(b"key"), LocalTraining(0.1, {}, {}))
    steps._rate = 1.0
    shared = context.initial.shared([silo])
    state = context.place(context.model_state(silo, shared))
    draws = torch.Generator().manual_seed(5)
    state = {
        part: {name: tensor + 0.05 * torch.randn(tensor.shape, generator=draws) for name, tensor in own.items()}
        for part, own in state.items()
    }
    found: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        total = noised_steps.clipped_sum
        patch.setattr(noised_steps, "clipped_sum", lambda each, *args: found.append(each) or total(each, *args))
        steps.step(0, state, shared, {})
    return torch.cat(found)


def changed(rows: TokenizedRows, lengths: dict[int, int]) -> TokenizedRows:
    """Give some rows other tokens, so many of them."""
    ids = [
        [own[0], *(own[1:-1] * LENGTH)[1 : lengths[row] - 1], own[-1]] if row in lengths else own
        for row, own in enumerate(rows.ids)
    ]
    types = None if rows.types is None else [[0] * len(own) for own in ids]
    windows = None if rows.windows is None else [[4, len(own) - 4] if len(own) > 8 else [len(own)] for own in ids]
    labels = rows.labels.clone()
    labels[list(lengths)] = 1 - labels[list(lengths)]
    return replace(rows, ids=ids, types=types, labels=labels, windows=windows)


WINDOWS = ("data.long_texts=windows", "data.windows_per_row=2")
MORE = {
    "lora, kept": ("lora", KEPT),
    "ia3, kept": ("ia3", KEPT),
    "lora, windows": ("lora", WINDOWS),
}


@pytest.mark.parametrize(
    ("tuner", "more"),
    [*((tuner, ()) for tuner in TUNERS), *(pytest.param(*case, id=name) for name, case in MORE.items())],
)
def test_no_bit_of_a_row_follows_other_rows(tuner, more, tiny_config, backbone_folder: object, monkeypatch):
    # two groups, one of which is smaller
    monkeypatch.setattr(noised_steps, "_AT_ONCE", 16 if "data.long_texts=windows" in more else 8)
    words = ("head.pooling=mean", f"tuner={tuner}", *TUNER_WORDS[tuner], f"train.max_length={LENGTH}", *more)
    made = build(tiny_config("fedavg", "data.tasks=[alpha]", *words))
    silo = next(iter(made.silos.values()))
    ((task, rows),) = silo.train.items()
    rows = rows.first(UNITS)
    rows = changed(rows, {0: LENGTH, 1: LENGTH})  # of full length: without padding
    names = [str(row) for row in range(UNITS)]
    before = vectors_of(made, replace(silo, train={task: replace(rows, units=names)}))
    assert (before != 0).any(1).all()
    if (cache := made.context.cache) is not None:
        assert (cache.misses, cache.hits) == (UNITS, 0)
        made.context.cache = None
        torch.testing.assert_close(vectors_of(made, replace(silo, train={task: replace(rows, units=names)})), before)
        made.context.cache = cache
    others = [row for row in range(UNITS) if row not in (0, 4, 9)]
    for lengths in ({row: 4 + row for row in others}, dict.fromkeys(others, LENGTH)):
        other = replace(changed(rows, lengths), units=names)
        after = vectors_of(made, replace(silo, train={task: other}))
        assert torch.equal(before[[0, 4, 9]], after[[0, 4, 9]])
        assert not torch.equal(before, after)
    with monkeypatch.context() as patch:
        units = noised_steps.units_of
        patch.setattr(noised_steps, "units_of", lambda of: [[] if n in others else u for n, u in enumerate(units(of))])
        after = vectors_of(made, replace(silo, train={task: replace(rows, units=names)}))
    assert torch.equal(before[[0, 4, 9]], after[[0, 4, 9]])
    assert not after[others].any()
