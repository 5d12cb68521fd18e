"""Label smoothing and class weights against their definitions, row by row and token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from silotune.data.batching import Batch, make_batch
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.predict import Predictor
from silotune.models.heads import HEADS, PLAIN, LanguageModelHead, LossRecipe
from silotune.training.phase_batches import phase_batches
from tests.models.heads.test_lm_loss import ROWS, TASK, encoded
from tests.support.language_models import backbone_of, made
from tests.support.views import view_of_batch

LABELS = [0, 0, 0, 0, 1, 1, 0, 0, 0, 1]
CLASSES = Task("t", ("no", "yes", "never"), "accuracy")


def rows(labels=LABELS) -> Batch:
    """Some rows of a set with these labels; the third label has no row."""
    source = TokenizedRows(CLASSES, [[1, 2]] * len(labels), None, torch.tensor(labels))
    return make_batch(source, [0, 4, 9, 2], 0)


def by_hand(logits: torch.Tensor, labels: list[int], weights: list[float], smoothing: float) -> float:
    """The weighted mean of `-Σ q log p`; a row's target q puts `1 - ε + ε/K` on its label, `ε/K` on the others.

    With weights, every class's term has that class's weight, and the sum of the labels' weights divides.
    """
    total = 0.0
    for row, label in zip(logits.double().tolist(), labels, strict=True):
        log_sum = math.log(sum(math.exp(value) for value in row))
        for place, value in enumerate(row):
            target = smoothing / len(row) + (1 - smoothing if place == label else 0)
            total -= weights[place] * target * (value - log_sum)
    return total / sum(weights[label] for label in labels)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(
    ("given", "weights"),
    [("none", [1, 1, 1]), ({"yes": 3.0}, [1, 3, 1]), ("balanced", [10 / (2 * 7), 10 / (2 * 3), 1])],
)
def test_of_classes(given, weights, smoothing):
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    batch = rows()
    found = LossRecipe(smoothing, given).cross_entropy(logits, batch)
    assert float(found) == pytest.approx(by_hand(logits, batch.labels.tolist(), weights, smoothing), rel=1e-5)
    if given == "none":
        expected = nn.functional.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_of_tokens(family):
    """transformers' logits at the answers' tokens, smoothed over the whole vocabulary."""
    backbone, head, smoothing = backbone_of(family), LanguageModelHead(), 0.3
    source = encoded(family)
    batch = make_batch(source, range(len(ROWS)), 0, 4)
    reading = head.smoothed_reading(backbone, TASK, smoothing)
    view = view_of_batch(backbone, batch, (), head_readings={head.name: reading})
    found = head.training_loss({}, view, batch, LossRecipe(smoothing))
    model, losses = made(family)[0], []
    with torch.no_grad():
        for ids, targets, reads in zip(source.ids, source.targets, source.reads, strict=True):
            if source.decoder is None:
                logits = model(input_ids=torch.tensor([ids])).logits[0, reads]
            else:
                place = source.ids.index(ids)
                logits = model(
                    input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([source.decoder[place]])
                ).logits[0, reads]
            logs = logits.log_softmax(-1)
            own = -logs[range(len(targets)), targets]
            losses += ((1 - smoothing) * own - smoothing * logs.mean(-1)).tolist()
    assert float(found) == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    plain = view_of_batch(backbone, batch, (), head_readings={head.name: head.reading(backbone, TASK)})
    assert float(head.training_loss({}, plain, batch, PLAIN)) != pytest.approx(float(found), rel=1e-4)


def test_scores_know_nothing_of_it(tiny_federation):
    """The loss by which validation is judged is the head's own."""
    losses = []
    for words in ((), ("train.label_smoothing=0.5", "train.class_weights=balanced")):
        federation = tiny_federation("fedavg", *words)
        silo, context = federation.silos["alpha"], federation.context
        state = context.place(federation.coordinator.shared | context.state_of(silo).private)
        losses.append(float(Predictor(context, state).loss(next(phase_batches(context, silo, context.phases[0], 1)))))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("head", "words", "message"),
    [
        ("lm", {"class_weights": "balanced"}, r"^train.class_weights: head=lm has no labels"),
        ("dpo", {"label_smoothing": 0.1}, r"^train.label_smoothing: head=dpo has a loss of its own"),
    ],
)
def test_heads_without_such_a_loss(head, words, message):
    with pytest.raises(InputError, match=message):
        HEADS[head]().check_loss(LossRecipe(**words))
    HEADS[head]().check_loss(PLAIN)


def test_a_label_that_no_silo_has(tiny_federation):
    tiny_federation("fedavg", "train.class_weights={bad: 2, maybe: 0.5}")
    with pytest.raises(InputError, match=r"^unknown label in train.class_weights 'god'.*did you mean 'good'"):
        tiny_federation("fedavg", "train.class_weights={god: 2}")
