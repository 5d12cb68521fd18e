"""Predict with one silo's model, without anything that training needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from silotune.core.tensors import State, Tensors
from silotune.data.batching import Batch
from silotune.methods.base import PredictionMix
from silotune.methods.parts import Part
from silotune.methods.step import REFERENCE, head_tensors, heads_of
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.activation_cache import ActivationCache
from silotune.models.forward.mixing import Mix, MixEntry, members, parse_name, resolve_weights
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import View
from silotune.models.heads import PLAIN, Head
from silotune.models.heads.base import head_readings
from silotune.models.tuners import Tuner, tuner_of
from silotune.models.tuners.base import TokenWeight


class PredictionContext:
    """The backbone, the parts and the head with which models of one kind predict; the tensors are given in every call.

    Args:
        backbone: the one backbone of all models.
        parts: the parts by name.
        prediction: how the parts are mixed, and which of them is the head.
        head: reads the states of the mix.
        method: the method's name, for messages.
        max_length: tokens at which a text is cut.
        rows_scored: rows of one batch.
        rows_written: prompts that are answered together.
        cache: keeps activations below the adapters; None: they are recomputed.
    """

    def __init__(
        self,
        backbone: Backbone,
        parts: Mapping[str, Part],
        prediction: PredictionMix,
        head: Head,
        *,
        method: str,
        max_length: int,
        rows_scored: int = 64,
        rows_written: int = 32,
        cache: ActivationCache | None = None,
    ) -> None:
        self.backbone = backbone
        self.parts = parts
        self.prediction = prediction
        self.head = head
        self.method_name = method
        self.max_length = max_length
        self.rows_scored = rows_scored
        self.rows_written = rows_written
        self.cache = cache
        self.guard: Callable[[], None] | None = None
        """Called before every forward of the backbone; what it raises ends the work."""
        self.vectors: dict[tuple[int, str], Tensor] | None = None
        """Vectors of rows, kept while many models are scored on the same rows (`instance_vectors.keeping_vectors`)."""

    @property
    def tuners(self) -> list[Tuner]:
        """The tuners of the parts, each once."""
        tuners = [tuner for part in self.parts.values() if (tuner := tuner_of(part.module)) is not None]
        return list({id(tuner): tuner for tuner in tuners}.values())

    @property
    def virtual_tokens(self) -> int:
        """The number of virtual tokens that tuners add to every row."""
        return sum(tuner.virtual_tokens for tuner in self.tuners)

    def place(self, state: State) -> State:
        """Return the parts of a model on the backbone's device, for one call that uses them (`Backbone.place`)."""
        return {name: self.backbone.place(tensors) for name, tensors in state.items() if name in self.parts}

    def entries(self, mix: Mix, state: State) -> list[MixEntry]:
        """Return a mix as tuners, weights and tensors, with the tensors that `state` holds now."""
        return self._entries(mix, state, lambda _, part: state[part])

    def _entries(self, mix: Mix, state: State, find: Callable[[str, str], Tensors]) -> list[MixEntry]:
        """Look up a mix's tuners, weights and tensors, which `find` gives for an anchor and a part."""
        entries = []
        for name, weight in resolve_weights(mix, state).items():
            anchor, part = parse_name(name)
            first, *others = members(part)
            tuner = tuner_of(self.parts[first].module)
            assert tuner is not None, f"part {part!r} is in a mix but is no tuner"
            tensors = find(anchor, first)
            for other in others:
                tensors = tensors | find(anchor, other)
            tokens = weight if isinstance(weight, TokenWeight) else None
            number = 1.0 if isinstance(weight, TokenWeight) else weight
            entries.append(MixEntry(tuner, tensors, number, tokens))
        return entries

    def prediction_mix(self, state: State, alpha: Tensor | None = None) -> list[MixEntry]:
        """Return the mix with which the model predicts, as `entries` does.

        `state` is on the device (`place`); `alpha`, shape (rows,), on any device, has each text's weight if the method
        weighs texts.
        """
        alpha = None if alpha is None else alpha.to(self.backbone.device)
        return self.entries(self.prediction.mixed(alpha), state)

    @property
    def answering(self) -> Head:
        """The head that answers; in a mix of heads the first one, as all are of one kind."""
        module = self.parts[heads_of(self.prediction.head)[0]].module
        assert isinstance(module, Head), "a method's declarations are checked"
        return module


class Predictor:
    """One model's predictions, batch by batch.

    `alpha` is the weight of each text, shape (texts,), if the method weighs texts.
    """

    def __init__(self, context: PredictionContext, state: State, alpha: Tensor | None = None) -> None:
        self._context, self._state, self._alpha = context, context.place(state), alpha
        self._head, self._tensors = context.answering, head_tensors(context.prediction.head, self._state)
        self._program = self._compile(None) if alpha is None else None

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of a batch of one task, shape (rows, outputs), in the batch's order."""
        return self._head.logits(self._tensors, self._views(batch)["prediction"], batch.task)

    @torch.no_grad()
    def loss(self, batch: Batch) -> Tensor:
        """Return the head's loss of a batch, shape ()."""
        views = self._views(batch)
        if self._head.reads_reference:
            return self._head.referenced_loss(self._tensors, views["prediction"], views[REFERENCE], batch)
        return self._head.training_loss(self._tensors, views["prediction"], batch, PLAIN)

    @torch.no_grad()
    def likelihoods(self, batch: Batch) -> Tensor:
        """Return the mean log-likelihood of each row's targets under a language model, shape (rows,)."""
        sums, counts = self._views(batch)["prediction"][self._head.name].unbind(1)
        return -sums / counts

    def _views(self, batch: Batch) -> dict[str, View]:
        program = self._program or self._compile(None if self._alpha is None else self._alpha[batch.rows])
        return program(batch)

    @torch.no_grad()
    def _compile(self, alpha: Tensor | None) -> ViewProgram:
        """Compile the prediction's mix, and where the head wants it the backbone alone."""
        context = self._context
        mixes = {"prediction": context.prediction_mix(self._state, alpha)}
        if self._head.reads_reference:
            mixes[REFERENCE] = []
        return ViewProgram(
            context.backbone,
            [mixes],
            readings=partial(head_readings, [self._head], context.backbone, 0.0),
            activation_cache=context.cache,
            guard=context.guard,
        )
