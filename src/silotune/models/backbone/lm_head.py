"""Split a language model into its transformer and its frozen language-model head, and score words with the head.

The model's own code runs over given states, including its layers between transformer and vocabulary (a dense layer and
a norm in BERT, a scale in T5, none in LLaMA). Only the last projection is replaced, by one that multiplies with the
rows of the wanted words alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LMHead:
    """The frozen layers that a masked, causal or encoder–decoder language model has on top of its base transformer.

    Args:
        model: a model with `get_output_embeddings()`.
        base: the model's base transformer; in an encoder–decoder its `decoder` gives the states.
    """

    def __init__(self, model: PreTrainedModel, base: nn.Module) -> None:
        source = _StateSource(base)
        projection = cast(nn.Linear, cast(Any, model).get_output_embeddings())
        self._projection = _WordProjection(projection)
        self._source = source
        self._scores_decoder = bool(model.config.is_encoder_decoder)
        inner = "decoder" if self._scores_decoder else str(cast(Any, model).base_model_prefix)
        top = _replaced(model, inner, source)
        place = next(name for name, module in model.named_modules() if module is projection)
        self._top = _replaced(top, place, self._projection)
        tied = [name for name, tensor in base.named_parameters() if tensor is projection.weight]
        self._tied = tied[0] if tied else None
        base_parameters = {id(tensor) for tensor in base.parameters()}
        self.parameters = {
            name: tensor for name, tensor in model.named_parameters() if id(tensor) not in base_parameters
        }
        """Parameters that are not the base transformer's; empty for a projection tied to the embeddings."""

    @property
    def vocabulary_size(self) -> int:
        """The number of words that can be scored."""
        return int(self._projection.weight.shape[0])

    def __call__(self, states: Tensor, words: Tensor | None = None, weights: Mapping[str, Tensor] = {}) -> Tensor:
        """Score words.

        Args:
            states: shape (…, hidden), of the base transformer's last layer.
            words: shape (words,), ids of the words to score; None: the whole vocabulary.
            weights: parameter's name → tensor used instead of the base transformer's own in this forward; a projection
                that is tied to the word embeddings follows.

        Returns:
            Logits of shape (…, words).
        """
        flat = states.reshape(1, -1, states.shape[-1])
        self._source.states = flat
        self._projection.words = words
        self._projection.replacement = weights.get(self._tied) if self._tied is not None else None
        try:
            extra: dict[str, Any] = {"encoder_outputs": (flat,)} if self._scores_decoder else {"return_dict": True}
            logits = cast(Tensor, cast(Any, self._top)(**extra).logits)
        finally:
            self._source.states = self._projection.words = self._projection.replacement = None
        return logits.reshape(*states.shape[:-1], -1)


class _StateSource(nn.Module):
    """Takes the base transformer's place in the model and returns given states, shape (1, tokens, hidden)."""

    states: Tensor | None = None

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["_base"] = base  # not a submodule: only its attributes are read

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return _output_class()(last_hidden_state=self.states)


@cache
def _output_class() -> type[Any]:
    """Return a class with the fields of a base transformer's output that models with a head read.

    It is made on first use: importing transformers takes a second, which `silotune methods` does without.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    @dataclass
    class Output(BaseModelOutputWithPastAndCrossAttentions):
        router_logits: Any = None  # mixtures of experts have it

    return Output


class _WordProjection(nn.Module):
    """The last linear layer, for all words or some."""

    words: Tensor | None = None
    replacement: Tensor | None = None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._cast: tuple[ReferenceType[Tensor], tuple[int, torch.dtype], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of shape (…, words) from states of shape (…, hidden)."""
        weight = self.weight if self.replacement is None else self.replacement
        bias = cast("Tensor | None", self.bias)
        if self.words is not None:
            weight, bias = weight[self.words], None if bias is None else bias[self.words]
        elif not torch.is_grad_enabled() and torch.is_autocast_enabled(x.device.type):
            weight = self._in(torch.get_autocast_dtype(x.device.type), weight)
        return nn.functional.linear(x, weight, bias)

    def _in(self, dtype: torch.dtype, weight: Tensor) -> Tensor:
        """Return the weights in `dtype` and keep the copy; autocast would cast them again for every token."""
        if weight.dtype == dtype:
            return weight
        version = (weight._version, dtype)
        if self._cast is None or self._cast[0]() is not weight or self._cast[1] != version:
            self._cast = ref(weight), version, weight.to(dtype)
        return self._cast[2]


def _replaced(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """Copy a module with `new` as its submodule at `path`; all others are shared with the original."""
    first, _, rest = path.partition(".")
    result = copy.copy(module)
    modules = dict(module._modules)
    modules[first] = _replaced(cast(nn.Module, modules[first]), rest, new) if rest else new
    result.__dict__["_modules"] = modules
    return result


def without_lm_head(model: Any) -> Any:
    """Return the model without its language-model head. T5 has no such module: one is assembled from its submodules."""
    if model.base_model is not model or model.get_output_embeddings() is None:
        return model.base_model
    from transformers import AutoModel

    with torch.device("meta"):
        bare: Any = AutoModel.from_config(model.config)  # type: ignore[no-untyped-call]
    for name, _ in bare.named_children():
        setattr(bare, name, getattr(model, name))
    return bare.requires_grad_(False).eval()
