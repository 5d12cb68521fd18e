"""`known_masks`: a context in which transformers makes attention masks from known padding, without asking the device.

transformers asks every mask whether it hides anything, which makes the host wait. Its table of mask functions
(`ALL_MASK_ATTENTION_FUNCTIONS`) is public: those of `eager` and `sdpa` are wrapped, and then answer from what `Padding`
knows. The masks are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

_known: Mapping[int, bool] = {}
"""Of the running forward: number of a mask's columns → whether it hides any."""

_wrapped: set[str] = set()
"""Kinds of attention whose mask function was wrapped."""


@contextlib.contextmanager
def known_masks(hides: Mapping[int, bool], attention: str) -> Iterator[None]:
    """Let transformers' masks be made from what is known while the context lasts.

    Args:
        hides: see `Padding.by_length`.
        attention: the model's kind of attention, e.g. `sdpa`.
    """
    global _known
    if hides:
        _wrap(attention)
    outer, _known = _known, hides
    try:
        yield
    finally:
        _known = outer


def _wrap(attention: str) -> None:
    """Wrap the mask function of a kind of attention, once."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as FUNCTIONS

    if attention in _wrapped or attention not in ("eager", "sdpa"):
        return
    FUNCTIONS[attention] = _informed(FUNCTIONS[attention])
    _wrapped.add(attention)


def _informed(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    def informed(*args: Any, **kwargs: Any) -> Any:
        mask, length = kwargs.get("attention_mask"), kwargs.get("kv_length")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or length not in _known or mask.shape[1] != length:
            return make_mask(*args, **kwargs)
        if not _known[length]:  # a mask of ones: the same as none
            kwargs["attention_mask"] = None
        elif kwargs.get("q_length") == length:  # it is needed: no need to ask whether it can be left out
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        else:
            kwargs["allow_is_bidirectional_skip"] = False
        return make_mask(*args, **kwargs)

    return informed
