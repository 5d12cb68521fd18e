"""Answers of the engine, alone and among other silos' requests, are those of `predict`."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from silotune.runs.personal_model import load_model
from silotune.serve.engine import Limits, ServingEngine
from silotune.serve.jobs import Refusal, Score, Scored, TextPiece, Write
from silotune.serve.models import Models
from tests.support.method_cases import of_kinds
from tests.support.small_runs import PAIRS, SINGLE

PROMPTS = ["say the garden was kind", "say a river and a song and the train", "say the soup", "the letter"]


@contextmanager
def engine(*folders: Path, **options: Any) -> Iterator[ServingEngine]:
    """A running engine over run folders."""
    limits = Limits(**options.pop("limits", {}))
    running = ServingEngine(Models(folders, **options), limits)
    running.start()
    try:
        yield running
    finally:
        running.stop()


def ask(running: ServingEngine, requests: Sequence[tuple[str, Score | Write]]) -> list[list[Any]]:
    """Ask all at once; returns each request's events."""
    events: queue.Queue[tuple[int, Any]] = queue.Queue()
    left = [1 if isinstance(work, Score) else work.choices for _, work in requests]
    found: list[list[Any]] = [[] for _ in requests]
    for number, (name, work) in enumerate(requests):
        model = running.models.find(name)
        running.submit(model, model, work, lambda event, number=number: events.put((number, event)))
    while any(left):
        number, event = events.get(timeout=60)
        found[number].append(event)
        if isinstance(event, Refusal):
            left[number] = 0
        elif not isinstance(event, TextPiece) or event.reason:
            left[number] -= 1
    return found


def written(events: Sequence[Any]) -> str:
    assert all(isinstance(event, TextPiece) for event in events), events
    return "".join(event.text for event in events)


def check_labels(folder: Path, of_a_batch: int = 1) -> None:
    expected = {silo: load_model(folder, silo) for silo in ("alpha", "beta")}
    texts = {silo: SINGLE if model.texts_per_row == 1 else PAIRS for silo, model in expected.items()}
    with engine(folder) as running:
        asked = [(silo, Score(texts[silo][:size])) for silo in expected for size in (3, 1, 2)]
        answers = [*ask(running, asked), *ask(running, asked[:1])]
        for (silo, work), (answer,) in zip([*asked, asked[0]], answers, strict=True):
            assert isinstance(answer, Scored), answer
            for own, one in zip(expected[silo].predict(work.texts), answer.predictions, strict=True):
                assert own.label == one.label
                assert [*one.probabilities.values()] == pytest.approx([*own.probabilities.values()], abs=1e-5)
        assert running.counts["forwards"] <= 2 + len(asked) - of_a_batch
        assert len(running.models.backbones) == 1


TUNERS = ("lora", "bottleneck", "prompt", "prefix", "ia3", "p-tuning", "dora", "vera")


@pytest.mark.parametrize("tuner", of_kinds(TUNERS, TUNERS[:4]))
def test_labels_of_several_silos_in_one_forward(runs, tuner):
    check_labels(runs.folder("bert", tuner), of_a_batch=6)


@pytest.mark.parametrize("tuner", ["full", "bitfit"])
def test_labels_of_models_that_share_no_forward(runs, tuner):
    check_labels(runs.folder("bert", tuner))


PREDICTING = ("fedmcp", "apfl", "feddpa-t", "fedrep", "fedalt", "fedmatch", "fdlora")


@pytest.mark.parametrize("method", of_kinds(PREDICTING, PREDICTING[:4]))
def test_labels_of_every_kind_of_prediction(runs, method):
    more = {"feddpa-t": ["head=mlp"], "fedalt": ["aggregation=rest-of-world"]}.get(method, [])
    check_labels(runs.folder("bert", "lora", f"method={{name: {method}}}", *more), of_a_batch=6)


def test_labels_of_silos_with_ranks_of_their_own(runs):
    words = ("method={name: hetlora}", "aggregation=hetlora", "tuner.r=5", "tuner.ranks.beta=2")
    check_labels(runs.folder("bert", "lora", *words), of_a_batch=6)


def test_label_words_of_several_silos(runs):
    words = ("head=verbalizer", "head.words={good: [great], bad: [awful], same: [warm], other: [cold]}")
    check_labels(runs.folder("bert", "prompt", *words, kind="masked"), of_a_batch=6)


def check_answers(run: Any, joins: bool = True) -> None:
    folder = run.folder
    models = {silo: load_model(folder, silo, run.federation.backbone) for silo in ("east", "west")}
    expected = {silo: model.write(PROMPTS) for silo, model in models.items()}
    asked = [(silo, Write(prompt, stream=stream)) for prompt in PROMPTS for silo in models for stream in (False, True)]
    for limits in ({}, {"written": 3, "begun": 2}):
        with engine(folder, limits=limits) as running:
            for (silo, work), events in zip(asked, ask(running, asked), strict=True):
                assert written(events) == expected[silo][PROMPTS.index(work.prompt)], (silo, work)
                assert events[-1].tokens <= 5
            if joins and not limits:
                assert running.counts["forwards"] <= 4, "several rows begin together"


@pytest.mark.parametrize(
    ("family", "tuner"),
    [
        *(("llama", tuner) for tuner in ("full", "lora", "prompt", "prefix")),
        pytest.param("llama", "ia3", marks=pytest.mark.long),
        *(("gpt2", "lora"), *(pytest.param("gpt2", tuner, marks=pytest.mark.long) for tuner in ("prompt", "prefix"))),
    ],
)
def test_answers_of_silos_share_steps(runs, family, tuner):
    check_answers(runs.generation(family, "causal", tuner), joins=tuner != "full")


@pytest.mark.parametrize("method", of_kinds(["fedmcp", "feddpa-t", "fedalt", "hetlora"], ["feddpa-t", "hetlora"]))
def test_answers_of_every_kind_of_prediction(runs, method):
    check_answers(runs.generation("llama", "causal", "lora", f"method={{name: {method}}}"))


@pytest.mark.parametrize("tuner", ["lora", "prefix"])
def test_answers_of_an_encoder_decoder(runs, tuner):
    check_answers(runs.generation("t5", "seq2seq", tuner), joins=False)
