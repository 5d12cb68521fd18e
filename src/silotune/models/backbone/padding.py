"""`Padding`: whether a batch's rows are padded, and where, looked at on the CPU before the batch is on a device.

Asking the device would make the host wait for it in every forward.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch._subclasses.fake_tensor import FakeTensor

from silotune.data.tokenized import Inputs

DECODER = "decoder_attention_mask"


@dataclass(frozen=True)
class Padding:
    """Where rows are padded.

    Args:
        left: whether any row begins with padding.
        text: whether any row has padding.
        decoder: whether any row has padding among its decoder tokens.
    """

    left: bool
    text: bool
    decoder: bool = False

    @classmethod
    def of(cls, inputs: Inputs) -> Padding | None:
        """Look at a batch's masks, on the CPU; None without a mask, or if masks have no data."""
        mask = inputs.get("attention_mask")
        if mask is None or isinstance(mask, FakeTensor):
            return None
        decoder = DECODER in inputs and not bool(inputs[DECODER].all())
        return cls(bool((mask[:, 0] == 0).any()), not bool(mask.all()), decoder)

    def by_length(self, text: Collection[int], decoder: int) -> dict[int, bool]:
        """Return number of a mask's columns → whether it hides any; nothing if two unlike masks have one length.

        Args:
            text: columns of the text's masks, with those of virtual tokens.
            decoder: columns of the decoder's mask; 0 without one.
        """
        if decoder in text and self.decoder != self.text:
            return {}
        return dict.fromkeys(text, self.text) | ({decoder: self.decoder} if decoder else {})
