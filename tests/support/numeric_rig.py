"""Federations in float64, random states, batches, and one `Step` made of its parts, for numeric tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch
from silotune.data.tokenized import Inputs, TokenizedRows
from silotune.methods import Phase, Step
from silotune.models.backbone.backbone import Backbone
from silotune.training.context import TrainingContext
from silotune.training.federation import Federation
from silotune.training.initial_parts import InitialParts
from silotune.training.silo import Silo
from tests.support.views import view_of_batch


def doubled(federation: Federation) -> Federation:
    """Turn a federation's backbone to float64 and its dropout off; returns the federation."""
    federation.backbone.model.double()
    for module in federation.backbone.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    context = federation.context  # the cached property `fixed` is replaced
    vars(context)["fixed"] = {
        part: {name: tensor.double() for name, tensor in tensors.items()} for part, tensors in context.fixed.items()
    }
    return federation


def parts_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Initialize parts in float64 from now on."""
    init, redrawn = InitialParts._one, InitialParts.redrawn
    monkeypatch.setattr(InitialParts, "_one", lambda *args: {name: one.double() for name, one in init(*args).items()})
    monkeypatch.setattr(
        InitialParts,
        "redrawn",
        lambda *args: {
            part: {name: one.double() for name, one in tensors.items()} for part, tensors in redrawn(*args).items()
        },
    )


def random_parts(federation: Federation, silo: Silo, seed: int = 5, spread: float = 0.2) -> State:
    """Return a silo's parts in float64, all but fixed ones moved away from their initial values (adapters: zeros)."""
    initial = federation.coordinator.shared | federation.context.state_of(silo).private
    draws = torch.Generator().manual_seed(seed)

    def moved(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=draws, dtype=torch.float64)
        return (tensor.double() + spread * noise).to(federation.backbone.device)

    parts = {part: {name: moved(tensor) for name, tensor in tensors.items()} for part, tensors in initial.items()}
    return parts | federation.context.fixed


def trained(state: State, phase: Phase) -> Tensors:
    """Replace the tensors in `state` that the phase trains by leaves with gradients; returns them by "part/tensor"."""
    leaves: Tensors = {}
    for part in phase.trains:
        state[part] = {name: tensor.detach().clone().requires_grad_() for name, tensor in state[part].items()}
        leaves |= {f"{part}/{name}": tensor for name, tensor in state[part].items()}
    return leaves


def padded(rows: TokenizedRows, chosen: Sequence[int], pad_id: int, extra: int = 0) -> Inputs:
    """Pad rows to one rectangle, with `extra` further columns of padding."""
    length = max(len(rows.ids[row]) for row in chosen) + extra
    ids = torch.full((len(chosen), length), pad_id)
    mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
    for position, row in enumerate(chosen):
        length_of_row = len(rows.ids[row])
        ids[position, :length_of_row], mask[position, :length_of_row] = torch.tensor(rows.ids[row]), 1
        if rows.types is not None:
            types[position, :length_of_row] = torch.tensor(rows.types[row])
    return {"input_ids": ids, "attention_mask": mask} | ({} if rows.types is None else {"token_type_ids": types})


def cut_batch(
    backbone: Backbone, rows: TokenizedRows, chosen: Sequence[int], micro_batch: int, extra: int = 0
) -> Batch:
    """Return a batch of the chosen rows in their order, in micro-batches of one size (the last may be smaller)."""
    pad_id = int(backbone.tokenizer.pad_token_id or 0)
    groups = [list(chosen[start : start + micro_batch]) for start in range(0, len(chosen), micro_batch)]
    index = torch.tensor(list(chosen))
    return Batch.of_inputs(
        rows.task, index, rows.labels[index], [padded(rows, group, pad_id, extra) for group in groups]
    )


def some_rows(federation: Federation, silo: Silo, count: int = 8, micro_batch: int = 3) -> Batch:
    """Return a batch of the silo's first rows in micro-batches of unequal length."""
    (rows,) = silo.train.values()
    return cut_batch(federation.backbone, rows, range(count), micro_batch)


def make_step(
    training: TrainingContext, phase: Phase, batch: Batch, state: State, received: State, memory: Tensors = {}
) -> Step:
    """Return the `Step` that the phase's loss is given for one batch; `memory` is the silo's."""
    views = {
        name: view_of_batch(training.backbone, batch, training.resolve(mix, state, received, memory))
        for name, mix in phase.views.items()
    }
    return Step(batch, views, state, received, memory, training.parts)


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
