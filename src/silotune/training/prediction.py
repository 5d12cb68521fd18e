"""What models of one kind predict with, without anything that training needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from silotune.core.tensors import State, Tensors
from silotune.methods.base import PredictionMix
from silotune.methods.parts import Part
from silotune.methods.step import heads_of
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.activation_cache import ActivationCache
from silotune.models.forward.mixing import Mix, MixEntry, members, parse_name, resolve_weights
from silotune.models.forward.untouched_vectors import UntouchedVectors
from silotune.models.heads import Head
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
        self.untouched: UntouchedVectors | None = None
        """Vectors of the untouched backbone, kept over rounds; None: no row is read twice."""
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
