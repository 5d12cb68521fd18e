"""Ids that a model has no embedding of are refused in one line, before a row is trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from silotune.config import load_config
from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.data.tokenized import RowTokenizer
from silotune.errors import InputError
from silotune.models.backbone.loading import _check_tokenizer
from tests.support.tiny import FAMILIES


def words(**ids: int) -> Any:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "yes": 1, "no": 2} | ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize(
    ("ids", "refused"), [({}, False), ({"late": 3}, False), ({"late": 4}, True), ({"late": 60}, True)]
)
def test_ids_with_a_gap(ids: dict[str, int], refused: bool) -> None:
    backbone: Any = SimpleNamespace(tokenizer=words(**ids), word_embeddings=torch.zeros(4, 2), name="tiny")
    if not refused:
        _check_tokenizer(backbone)
        return
    with pytest.raises(InputError, match=rf"has {ids['late'] + 1} tokens and its model 4 word embeddings"):
        _check_tokenizer(backbone)


def test_segments_of_pairs() -> None:
    tokenizer, task = FAMILIES["bert"].tokenizer(), Task("t", ("a", "b"))
    pair, single = Row(("good", "bad"), 0), Row(("good",), 0)
    for segments in (0, 2):
        assert RowTokenizer(tokenizer, 20, segments)(task, [pair]).types is not None
    RowTokenizer(tokenizer, 20, 1)(task, [single])
    with pytest.raises(InputError, match="segment ids up to 1, and the backbone has embeddings of 1"):
        RowTokenizer(tokenizer, 20, 1)(task, [single, pair][1:])


def test_lists_are_read_as_the_documentation_writes_them() -> None:
    assert load_config("demo", ["data.ratio=0.5,0.3,0.2"]).data.ratio == (0.5, 0.3, 0.2)
    for wrong in ("data.labels=a", "data.ratio=7"):
        with pytest.raises(InputError, match=r"must be a list, such as \[a, b\]"):
            load_config("demo", ["data.task=t", wrong])
