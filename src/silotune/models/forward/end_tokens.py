"""`end_tokens` that end an answer: of the tokenizer, of the model's generation settings and of its chat template."""

from __future__ import annotations

from typing import Any

from silotune.data.chat_template import turn_end_ids
from silotune.models.backbone.backbone import Backbone


def end_tokens(backbone: Backbone) -> frozenset[int]:
    """Return the tokens after which an answer is complete.

    They are the tokenizer's end token, those of the model's `generation_config` (one or a list), and those by which the
    tokenizer's chat templates end the assistant's turn, such as `<|im_end|>`.
    """
    own: Any = backbone.tokenizer.eos_token_id
    listed: Any = getattr(getattr(backbone.model, "generation_config", None), "eos_token_id", None)
    ends = [*(listed if isinstance(listed, list) else [listed]), own, *turn_end_ids(backbone.tokenizer)]
    return frozenset(int(token) for token in ends if token is not None)
