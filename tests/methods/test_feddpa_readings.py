"""FedDPA as the paper says and as its authors' code does: weights of texts, and the order of the phases.

`tests/fixtures/feddpa-authors.json` holds numbers of the authors' own functions over the recorded run of FedDPA-T.
"""

from __future__ import annotations

import json

import pytest
import torch

from silotune.core.tensors import copy as copied
from silotune.data.batching import make_batch
from silotune.errors import InputError
from silotune.evaluation.federation_scores import current_model_state
from silotune.evaluation.instance_vectors import weigh, with_instances
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.run_result import load_run
from silotune.training.local_trainer import LocalTrainer
from tests.support import old_runs
from tests.support.views import view_of_batch

READINGS = {
    "paper": (),
    "code": ("method.weight_of=global", "method.embed=local", "method.clip=false"),
}
OTHER = {"echo": "always", "always": "echo"}
"""Each silo's model is asked about the other silo's texts."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return old_runs.put_in_place(tmp_path_factory.mktemp("old") / "runs")


@pytest.fixture(scope="module")
def recorded(root):
    """The parts of the recorded run at its end."""
    return load_run(root / "feddpa-t" / "run").federation


@pytest.fixture
def opened(root, recorded):
    """`opened(*words)` → a federation of the recorded parts with other options."""

    def make(*words):
        federation = build(read_config(str(root / "feddpa-t" / "run" / "config.yaml"), [*words]), recorded.backbone)
        federation.coordinator.shared = recorded.coordinator.shared
        for name, silo in federation.silos.items():
            silo.state = recorded.silos[name].state
        return federation

    return make


@torch.no_grad()
def next_words(federation, state, rows, alpha):
    """Scores of the first word of every answer, each text under its own α, shape (texts, vocabulary)."""
    training = federation.context
    batch = make_batch(rows, range(len(rows)), 0)
    mix = training.method.prediction().mixed(alpha[batch.rows])
    view = view_of_batch(training.backbone, batch, training.resolve(mix, state, {}, {}))
    scores = torch.zeros(len(rows), training.backbone.model.config.vocab_size)
    scores[batch.rows] = view["last"] @ training.backbone.model.lm_head.weight.T
    return scores


@pytest.mark.parametrize("silo", OTHER)
@pytest.mark.parametrize("reading", READINGS)
def test_weights_and_answers_are_those_of_the_authors_functions(opened, reading, silo):
    expected = json.loads((old_runs.FIXTURES / "feddpa-authors.json").read_text())[silo][reading]
    federation = opened(*READINGS[reading])
    state = current_model_state(federation, federation.silos[silo])
    asked = federation.silos[OTHER[silo]].evaluations[OTHER[silo]].test
    found = weigh(federation.context, state, asked)
    assert found.sampled.tolist() == [text["drawn"] for text in expected]
    alpha = torch.tensor([text["alpha"] for text in expected])
    torch.testing.assert_close(found.alpha, alpha, rtol=0, atol=1e-6)
    prompts = [ids[:length] for ids, length in zip(asked.ids, asked.prompts, strict=True)]
    rows = type(asked)(asked.task, prompts, None, asked.labels)
    scores = next_words(federation, state, rows, found.alpha)
    logits = torch.tensor([text["logits"] for text in expected])
    torch.testing.assert_close(scores[:, : logits.shape[1]], logits, rtol=0, atol=1e-5)


def test_the_readings_differ_by_more_than_the_fixtures_tolerance():
    numbers = json.loads((old_runs.FIXTURES / "feddpa-authors.json").read_text())
    for silo in numbers.values():
        for paper, code in zip(silo["paper"], silo["code"], strict=True):
            assert abs(paper["alpha"] - code["alpha"]) > 1e-5
            assert max(abs(a - b) for a, b in zip(paper["logits"], code["logits"], strict=True)) > 1e-3


@pytest.mark.parametrize("weighting", ["dynamic", "fixed"])
def test_the_other_part_has_the_rest(opened, weighting):
    words = (f"method.weighting={weighting}", "method.alpha=0.3")
    mixes = {}
    for part in ("local", "global"):
        prediction = opened(*words, f"method.weight_of={part}").method.prediction()
        mixes[part] = prediction.mixed(None if weighting == "fixed" else torch.tensor([0.3, 0.25]))
    own, other = mixes["local"], mixes["global"]
    assert torch.equal(torch.as_tensor(own["private"]), torch.as_tensor(other["global"]))
    assert torch.equal(torch.as_tensor(own["global"]), torch.as_tensor(other["private"]))
    assert float(torch.as_tensor(own["private"]).max()) == pytest.approx(0.3)


@pytest.mark.parametrize("part", ["local", "global"])
def test_without_rows_of_its_own_a_silo_answers_with_the_global_part(opened, part):
    federation = opened(f"method.weight_of={part}")
    silo = federation.silos["echo"]
    silo.state = None
    state = with_instances(federation.context, silo, federation.coordinator.shared)
    weights = weigh(federation.context, state, silo.evaluations["echo"].test)
    mix = federation.method.prediction().mixed(weights.alpha)
    assert set(mix["global"].tolist()) == {1.0}
    assert set(mix["private"].tolist()) == {0.0}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_local_first_is_the_received_global_part_from_the_second_round_on(opened):
    found = {}
    for words in (("method.order=local-first",), ("method.sees=received",), ()):
        federation = opened(*words)
        silo, shared = federation.silos["echo"], federation.coordinator.shared
        before = {name: copied(tensors) for name, tensors in silo.state.private.items()}
        found[words] = [LocalTrainer(federation.context).rounds([silo], shared, number)[0].state for number in (1, 2)]
    first, received, plain = found.values()
    assert equal(first[0]["private"], before["private"])  # no local phase in the federation's first round
    assert equal(first[1]["private"], received[1]["private"])
    assert not equal(first[1]["private"], before["private"])
    assert not equal(first[1]["private"], plain[1]["private"])
    for states in found.values():
        for state, usual in zip(states, plain, strict=True):
            assert equal(state["global"], usual["global"])


@pytest.mark.parametrize(
    "words", [("method.weight_of=both",), ("method.order=local",), ("method=feddpa-f", "method.order=local-first")]
)
def test_other_readings_are_refused(opened, words):
    with pytest.raises(InputError, match=r"method\.(weight_of|order)"):
        opened(*words)
