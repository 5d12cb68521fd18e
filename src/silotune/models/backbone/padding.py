"""Tell transformers where a batch is padded, so that it does not ask the device and make the host wait.

transformers asks of every mask whether it hides anything. Its table of mask functions
(`ALL_MASK_ATTENTION_FUNCTIONS`) is public: those of `eager` and `sdpa` are wrapped, and answer from what `Padding` saw
on the CPU. The masks are the same. They are wrapped for the whole process, because models look them up by the kind of
attention inside their own forward, and a kind of another name would lose what is written for `eager` and `sdpa`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from silotune.data.tokenized import Inputs

DECODER = "decoder_attention_mask"


@dataclass(frozen=True)
class Padding:
    """The padding of a batch's rows.

    Args:
        left: whether any row begins with padding.
        text: whether any row has padding.
        decoder: whether any row has padding among its decoder tokens.
    """

    left: bool
    text: bool
    decoder: bool = False

    @classmethod
    def of(cls, inputs: Inputs, masked: bool = False) -> Padding | None:
        """Look at a batch's masks, on the CPU; None without a mask, or if masks have no data; see `MicroBatch`."""
        mask = inputs.get("attention_mask")
        if mask is None or isinstance(mask, FakeTensor):
            return None
        decoder = DECODER in inputs and (masked or not bool(inputs[DECODER].all()))
        return cls(bool((mask[:, 0] == 0).any()), masked or not bool(mask.all()), decoder)

    def by_length(self, text: Collection[int], decoder: int) -> dict[int, bool]:
        """Map a mask's number of columns to whether it hides any; empty if two different masks have the same length.

        `text` are the columns of the text's masks, with virtual tokens; `decoder` those of the decoder's, or 0.
        """
        if decoder in text and self.decoder != self.text:
            return {}
        return dict.fromkeys(text, self.text) | ({decoder: self.decoder} if decoder else {})


_known: Mapping[int, bool] = {}
"""Of the running forward: number of a mask's columns → whether it hides any."""

_wrapped: set[str] = set()
"""Kinds of attention whose mask function was wrapped."""


@contextlib.contextmanager
def known_masks(hides: Mapping[int, bool], attention: str) -> Iterator[None]:
    """Within the context, build transformers' masks from the known padding instead of reading it from the device."""
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
    make_mask: Callable[..., Any] = FUNCTIONS[attention]

    def informed(*args: Any, **kwargs: Any) -> Any:
        mask, length = kwargs.get("attention_mask"), kwargs.get("kv_length")
        if not _known:  # a forward of others: where one is traced for an export, lengths are no numbers
            return make_mask(*args, **kwargs)
        if not isinstance(mask, Tensor) or mask.dim() != 2 or length not in _known or mask.shape[1] != length:
            return make_mask(*args, **kwargs)
        if not _known[length]:  # a mask of ones: the same as none
            kwargs["attention_mask"] = None
        elif kwargs.get("q_length") == length:  # it is needed: no need to ask whether it can be left out
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        else:
            kwargs["allow_is_bidirectional_skip"] = False
        return make_mask(*args, **kwargs)

    FUNCTIONS[attention] = informed
    _wrapped.add(attention)
