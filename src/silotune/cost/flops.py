"""Count FLOPs and memory of a method's real training step and prediction, run on fake tensors.

The method's own phases run on fake tensors, and PyTorch's counter sees every matrix product of a real step.

The count is 2·m·k·n for a product of (m × k) and (k × n). For a backbone of B blocks of width d, feed-forward width
f and T tokens, one view's forward is `B·(8·T·d² + 4·T·d·f + 4·T²·d)` (query, key, value and output; feed-forward;
scores and their use), and a part adds `2·T·numel` for each of its matrices. In the backward pass a product costs as
much again for the gradient of its activation, if trainable tensors lie below it, and again for the gradient of its
weight, if that is trainable. So a step costs a forward for every view, and about as much again for every view with
trained parts (twice as much in full fine-tuning); views of constant parts, such as `received(...)`, cost the forward
alone. Where each text has its own weights (FedDPA), a prediction is two forwards: one embeds the text, one is the
personalized model's; the silo's own rows are embedded once for all predictions, which is not counted. Additions, norms,
softmax and the optimizer are not counted, as is usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from silotune.config import TrainConfig
from silotune.core.tensors import State, copy
from silotune.cost.backbone_shapes import STATES, all_states
from silotune.data.batching import Batch
from silotune.data.tasks import Task
from silotune.data.tokenized import Inputs
from silotune.methods import Method, Step
from silotune.methods.parts import Scope
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import POOLINGS
from silotune.training.context import TrainingContext

_READINGS = POOLINGS | {STATES: all_states}

DECODER_TOKENS = 2
"""Tokens of a decoder's input for a classified row: its start token and the mask (FedPrompt)."""


@dataclass(frozen=True)
class WorkCount:
    """Operations per sample, and bytes in memory at the start of the backward pass, the most of any phase.

    `train` is one pass over a sample through all phases of the kind of round with most; `predict` one forward of the
    personalized model, and the one that weights the text, if any. `saved` are the activations of a batch that autograd
    keeps, `training_state` parts with gradients, optimizer state and received copies.
    """

    train: int
    predict: int
    saved: int
    training_state: int


def shape_batch(backbone: Backbone, task: Task, rows: int, tokens: int, decode: int) -> Batch:
    """Make a batch of texts without padding whose token ids mean nothing; without `decode` tokens no decoder runs."""
    ones = torch.ones(rows, tokens, dtype=torch.int64)
    inputs: Inputs = {"input_ids": ones, "attention_mask": ones}
    if decode and backbone.base.config.is_encoder_decoder:
        decoder = torch.ones(rows, decode, dtype=torch.int64)
        inputs |= {"decoder_input_ids": decoder, "decoder_attention_mask": decoder}
    labels = torch.zeros(rows, dtype=torch.int64)
    return Batch.of_inputs(task, torch.arange(rows), labels, [inputs])


def count_work(
    backbone: Backbone, method: Method, state: State, batch: Batch, train: TrainConfig, rounds: int
) -> WorkCount:
    """Run every phase's step and a prediction on fake tensors (under their mode), and count.

    The batch is one of `shape_batch`; other kinds of the run's rounds may have other phases.
    """
    context = TrainingContext(backbone, method, train, 0, rounds=rounds)
    constant = {tensor.untyped_storage()._cdata for tensor in backbone.base.state_dict(keep_vars=True).values()}
    rows = len(batch)
    kinds = [[phase.name for phase in phases if phase.trains] for phases in context.kinds_of_rounds()]
    operations: dict[str, int] = {}
    saved = training_state = 0
    for phase in context.phases:
        if not any(phase.name in kind for kind in kinds):
            continue
        silo_state = {name: copy(tensors) for name, tensors in state.items()}
        received = {name: copy(silo_state[name]) for name, part in context.parts.items() if part.scope is Scope.SHARED}
        for name in phase.trains:
            silo_state[name] = {key: tensor.requires_grad_() for key, tensor in silo_state[name].items()}
        parts = [*_tensors(silo_state), *_tensors(received)]
        with FlopCounterMode(display=False) as counter, _saved() as storages:
            mixes = {name: context.resolve(mix, silo_state, received, {}) for name, mix in phase.views.items()}
            views = ViewProgram(backbone, [mixes], _READINGS)(batch)
            step = Step(batch, views, silo_state, received, {}, context.parts)
            phase.loss(step).backward()  # type: ignore[no-untyped-call]
        operations[phase.name] = phase.steps_per_batch * counter.get_total_flops()
        leaves = constant | {tensor.untyped_storage()._cdata for tensor in parts}
        saved = max(saved, sum(size for storage, size in storages.items() if storage not in leaves))
        trained = [tensor for name in phase.trains for tensor in silo_state[name].values()]
        training_state = max(
            training_state, 4 * (_numel(parts) + _numel(trained) + sum(_moments(tensor, train) for tensor in trained))
        )
    prediction = method.prediction()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if prediction.weighting is not None:
            weighting_mix = context.resolve(prediction.weighting.view, state, {}, {})
            ViewProgram(backbone, [{"weighting": weighting_mix}])(batch)
        mixes = {"prediction": context.resolve(prediction.mix, state, {}, {})}
        views = ViewProgram(backbone, [mixes], _READINGS)(batch)
        step = Step(batch, views, state, {}, {}, context.parts)
        step.logits("prediction", prediction.head)
    train_operations = max((sum(operations[name] for name in kind) for kind in kinds), default=0)
    return WorkCount(round(train_operations / rows), round(counter.get_total_flops() / rows), saved, training_state)


def _tensors(state: State) -> list[Tensor]:
    return [tensor for tensors in state.values() for tensor in tensors.values()]


def _numel(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _moments(tensor: Tensor, train: TrainConfig) -> int:
    if train.optimizer == "sgd":
        return 0
    if train.optimizer == "adafactor":
        size = tensor.numel()
        return size if tensor.dim() < 2 else size // tensor.shape[-1] + size // tensor.shape[-2]
    return 2 * tensor.numel()


@contextmanager
def _saved() -> Iterator[dict[int, int]]:
    """Yield a dictionary that collects the storages which autograd saves: id → bytes."""
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # an id may be reused once its storage is freed

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
