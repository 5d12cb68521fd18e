"""The backbone's own language-model head: states in, scores of words out, for some words or the whole vocabulary.

The model's own code is run over given states, whatever lies between its transformer and its vocabulary (a dense layer
and a norm in BERT, a scale in T5, nothing in LLaMA); only the last projection is replaced, by one that multiplies with
the rows of the wanted words alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LMHead:
    """What a masked, causal or encoder–decoder language model has on top of its base transformer, frozen.

    Args:
        model: a model with `get_output_embeddings()`.
        base: its base transformer; where that is the model itself (T5), its `decoder` gives the states.
    """

    def __init__(self, model: PreTrainedModel, base: nn.Module) -> None:
        given = _Given(base)
        projection = cast(nn.Linear, cast(Any, model).get_output_embeddings())
        self._projection = _Projection(projection)
        self._given = given
        self._scores_decoder = bool(model.config.is_encoder_decoder)
        inner = "decoder" if self._scores_decoder else str(cast(Any, model).base_model_prefix)
        top = _replaced(model, inner, given)
        self._top = _replaced(top, _name_of(model, projection), self._projection)
        tied = [name for name, tensor in base.named_parameters() if tensor is projection.weight]
        self._tied = tied[0] if tied else None
        own = {id(tensor) for tensor in base.parameters()}
        self.parameters = {name: tensor for name, tensor in model.named_parameters() if id(tensor) not in own}
        """What the head has beside the base transformer: nothing where it is tied and plain."""

    @property
    def words(self) -> int:
        """The vocabulary's size."""
        return int(self._projection.weight.shape[0])

    def __call__(self, states: Tensor, words: Tensor | None = None, weights: Mapping[str, Tensor] = {}) -> Tensor:
        """Scores (logits), shape (…, words).

        Args:
            states: shape (…, hidden), of the base transformer's last layer.
            words: ids of the words to score; None: all.
            weights: tensors that stand for the base transformer's own in this forward: a vocabulary that is tied to
                the word embeddings changes with them.
        """
        flat = states.reshape(1, -1, states.shape[-1])
        self._given.states = flat
        self._projection.words = words
        self._projection.other = weights.get(self._tied) if self._tied is not None else None
        try:
            extra: dict[str, Any] = {"encoder_outputs": (flat,)} if self._scores_decoder else {"return_dict": True}
            logits = cast(Tensor, cast(Any, self._top)(**extra).logits)
        finally:
            self._given.states = self._projection.words = self._projection.other = None
        return logits.reshape(*states.shape[:-1], -1)


class _Given(nn.Module):
    """Stands where the base transformer was, and returns given states."""

    states: Tensor | None = None

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["_base"] = base  # not as a submodule: it is only asked for attributes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"], name)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=cast(Any, self.states))


class _Projection(nn.Module):
    """The last linear layer, for all words or some."""

    words: Tensor | None = None
    other: Tensor | None = None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.other is None else self.other
        bias = cast("Tensor | None", self.bias)
        if self.words is not None:
            weight, bias = weight[self.words], None if bias is None else bias[self.words]
        return nn.functional.linear(x, weight, bias)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return str(next(name for name, module in model.named_modules() if module is wanted))


def _replaced(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """A copy of the module that shares everything with it but the submodule at `path`."""
    first, _, rest = path.partition(".")
    result = copy.copy(module)
    modules = dict(module._modules)
    modules[first] = _replaced(cast(nn.Module, modules[first]), rest, new) if rest else new
    result.__dict__["_modules"] = modules
    return result
