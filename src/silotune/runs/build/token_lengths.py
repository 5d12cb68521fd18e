"""`token_lengths` counts the tokens of silos' training rows by the tokenizer alone: no weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from silotune.config import Config
from silotune.data.row_checks import spread
from silotune.data.rows import Row, SiloData
from silotune.errors import InputError
from silotune.models.backbone.loading import silence_transformers
from silotune.models.backbone.stored_model import default_backbone, hub_options

MOST_ROWS = 10_000
"""Training rows of a silo that are tokenized, the first ones of the (shuffled) split."""


def token_lengths(config: Config, silos: Sequence[SiloData]) -> dict[str, dict[str, Any]]:
    """Return silo → median, 95th percentile and maximum of tokens in a training row, and the share that is cut.

    Tokens are those of a row's texts, and of its answers where it has some, without a template's own. `cut` is the
    share of rows (in percent) longer than `train.max_length`.
    """
    silence_transformers()
    from transformers import AutoTokenizer

    settings = config.backbone
    try:
        source = default_backbone() if settings.name == "default" else settings.name
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **hub_options(settings))
    except (OSError, ValueError) as error:
        raise InputError(f"backbone={settings.name}: no tokenizer there, so tokens are not counted") from error
    found = {}
    for silo in silos:
        rows = silo.splits.train[:MOST_ROWS]
        lengths = _lengths(tokenizer, rows)
        cut = sum(length > config.train.max_length for length in lengths)
        found[silo.name] = {**(spread(lengths) or {}), "cut": 100 * cut / len(lengths)}
    return found


def _lengths(tokenizer: Any, rows: Sequence[Row]) -> list[int]:
    """Return the number of tokens of each row."""
    if not rows[0].turns and not rows[0].answer:
        columns = [list(texts) for texts in zip(*(row.texts for row in rows), strict=True)]
        return [len(ids) for ids in tokenizer(*columns, truncation=False, verbose=False)["input_ids"]]
    texts = ["\n".join([content for _, content in row.turns] or row.texts) for row in rows]
    answers = [max(row.answer, row.rejected, key=len) for row in rows]
    prompts = tokenizer(texts, truncation=False, verbose=False)["input_ids"]
    written = tokenizer(answers, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return [len(prompt) + len(answer) + 1 for prompt, answer in zip(prompts, written, strict=True)]
