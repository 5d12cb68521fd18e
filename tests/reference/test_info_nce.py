"""InfoNCE, the metrics of ranks and BM25 against plain loops, and the loss against sentence-transformers'."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from silotune.data.batching import Batch
from silotune.data.kinds.retrieval import Retrieval, bm25, rank_scores, ranked_among, ranks_of
from silotune.data.rows import Row
from silotune.data.tasks import RANK_METRICS, Task
from silotune.models.forward.views import View
from silotune.models.heads.retrieval import RetrievalHead

TASK = Task("t", (), "ndcg10", "retrieval")
ROWS = [
    Row(("q0",), 0, target=("a", ("b", "c"), ())),
    Row(("q1",), 0, target=("d", ("e", "f"), ())),
    Row(("q2",), 0, target=("g", ("h", "i"), ())),
    Row(("q3",), 0, target=("j", ("k", "l"), ())),
]
ALIKE = [
    replace(ROWS[0], target=("a", ("b", "d"), ())),
    ROWS[1],
    Row(("q2",), 0, target=("a", ("h", "a"), ())),
    ROWS[3],
]


def batch_of(rows: list[Row], seed: int = 0) -> tuple[Batch, Tensor]:
    """Return a batch in an order of its own, with random states, float64."""
    targets = Retrieval().targets(TASK, rows)
    draws = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(targets), generator=draws)
    states = torch.randn(len(targets), 8, generator=draws, dtype=torch.float64)
    return Batch(TASK, 7 + order, targets[order], ()), states


def loops(rows: list[Row], states: Tensor, order: Tensor, temperature: float, in_batch: bool) -> float:
    by_place = dict(zip((order - 7).tolist(), states.numpy(), strict=True))
    texts, place = [], 0
    for row in rows:
        own = [row.target[0], *row.target[1]]
        texts.append((by_place[place], [(text, by_place[place + 1 + k]) for k, text in enumerate(own)]))
        place += 1 + len(own)
    losses = []
    for number, (query, own) in enumerate(texts):
        terms = []
        for other, (_, passages) in enumerate(texts):
            for k, (text, vector) in enumerate(passages):
                right = other == number and k == 0
                if right or ((in_batch or other == number) and text != own[0][0]):
                    cosine = float(query @ vector) / math.sqrt(float(query @ query) * float(vector @ vector))
                    terms.append((right, cosine / temperature))
        losses.append(math.log(sum(math.exp(s) for _, s in terms)) - next(s for right, s in terms if right))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("rows", [ROWS, ALIKE])
def test_the_loss_is_that_of_loops(rows, in_batch):
    batch, states = batch_of(rows)
    found = RetrievalHead(0.1, in_batch=in_batch).cross_entropy({}, View({"mean": states}), batch)
    assert float(found) == pytest.approx(loops(rows, states, batch.rows, 0.1, in_batch), abs=1e-10)


def test_the_loss_is_sentence_transformers():
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    batch, states = batch_of(ROWS)
    found = RetrievalHead(0.05).cross_entropy({}, View({"mean": states}), batch)
    columns = states[batch.rows.argsort()].reshape(4, 4, 8).unbind(1)
    expected = MultipleNegativesRankingLoss(nn.Identity()).compute_loss_from_embeddings([*columns], torch.zeros(4))
    assert float(found) == pytest.approx(float(expected), abs=1e-10)


def test_ranks_are_those_of_sorted_passages():
    draws = torch.Generator().manual_seed(1)
    names = "abcdefgh"
    for _ in range(200):
        drawn = torch.randint(len(names), (6, 2), generator=draws).tolist()
        rows = [Row((f"q{n}",), 0, target=(names[a], (names[b],), ())) for n, (a, b) in enumerate(drawn)]
        rows = ranked_among(rows, ["x", "y", "a", *"0123456789"])
        vectors: dict[str, Tensor] = {}
        texts = [text for row in rows for text in (*row.texts, row.target[0], *row.target[1], *row.target[2])]
        for text in texts:
            vectors.setdefault(text, nn.functional.normalize(torch.randn(4, generator=draws), dim=0))
        outputs, targets = torch.stack([vectors[text] for text in texts]), Retrieval().targets(TASK, rows)
        ranks = ranks_of(outputs, targets)
        pool = sorted({*texts} - {row.texts[0] for row in rows})
        expected: dict[str, list[float]] = {name: [] for name in RANK_METRICS}
        for row, rank in zip(rows, ranks, strict=True):
            best = sorted(pool, key=lambda text: -float(vectors[row.texts[0]].double() @ vectors[text].double()))
            place = best.index(row.target[0]) + 1
            assert rank == place
            expected["ndcg10"].append(1 / math.log2(place + 1) if place <= 10 else 0)
            expected["mrr"].append(1 / place)
            for most in (1, 10):
                expected[f"recall{most}"].append(row.target[0] in best[:most])
        scores = Retrieval().scores(TASK, outputs, targets)
        columns = Retrieval().written(TASK, outputs, targets)
        for name, values in expected.items():
            assert scores[name][0] == pytest.approx(100 * np.mean(values))
            twice = np.array([[2, 0, 1, 0, 0, 0]])
            score = Retrieval().resampled(TASK, name, columns)(twice)
            assert score[0] == pytest.approx(100 * (2 * values[0] + values[2]) / 3)


def test_equal_scores_count_against_the_right_passage():
    targets = Retrieval().targets(TASK, ROWS)
    assert ranks_of(torch.ones(len(targets), 1), targets).tolist() == [12] * 4
    assert rank_scores(np.array([12, 1]))["recall10"] == [50.0]


def test_bm25_is_the_formula():
    passages = ["the heart beats", "the Heart, the lung", "kidneys filter blood in the body"]
    query = "the heart heart xyz"
    words = [re.sub(r"\W", " ", text.lower()).split() for text in passages]
    mean = sum(map(len, words)) / 3
    for text, found in zip(words, bm25([query], passages)[0], strict=True):
        expected = 0.0
        for word in query.split():
            n, f = sum(word in other for other in words), text.count(word)
            expected += math.log(1 + (3 - n + 0.5) / (n + 0.5)) * f / (f + 1.5 * (0.25 + 0.75 * len(text) / mean))
        assert found == pytest.approx(expected)
