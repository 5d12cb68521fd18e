"""The size of micro-batches changes neither losses nor gradients, for every method."""

from __future__ import annotations

from random import Random

import pytest
import torch

from silotune.core.tensors import digest, flatten
from silotune.data import batching
from silotune.data.batching import CALL_COST, call_cost_for, epoch_batches, make_batch
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation.predict import Predictor
from silotune.methods.parts import Scope
from silotune.runs.build.builder import build
from tests.support.method_cases import every_method
from tests.support.numeric_rig import cut_batch, doubled, make_step, random_parts, trained
from tests.support.tiny import FAMILIES, ONE_TASK

ROWS = 14


def gradients(federation, phase, state, received, batch):
    state = dict(state)
    leaves = trained(state, phase)
    loss = phase.loss(make_step(federation.context, phase, batch, state, received))
    loss.backward()
    return float(loss.detach()), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def batches(backbone, rows):
    """Yield the same rows in micro-batches of 1, 4 and 9, and as `make_batch` cuts them at two costs of a call."""
    for size, extra in ((1, 0), (4, 5), (9, 0)):  # extra columns of padding alone
        yield cut_batch(backbone, rows, range(ROWS), size, extra)
    pad_id = int(backbone.tokenizer.pad_token_id)
    for found in (make_batch(rows, range(ROWS), pad_id, *cost) for cost in ([], [0])):
        assert sorted(found.rows.tolist()) == list(range(ROWS))
        assert torch.equal(found.labels, rows.labels[found.rows])
        yield found


def compare(federation):
    """Compare losses and gradients of each phase with those of the whole batch as one padded rectangle."""
    silo = federation.silos.get("gamma") or next(iter(federation.silos.values()))
    rows = silo.train.get("gamma") or next(iter(silo.train.values()))
    state, other = (random_parts(federation, silo, seed=seed, spread=0.1) for seed in (1, 2))
    parts = federation.context.parts
    received = {name: other[name] for name, part in parts.items() if part.scope is Scope.SHARED}
    assert len({len(rows.ids[row]) for row in range(ROWS)}) > 4
    whole = cut_batch(federation.backbone, rows, range(ROWS), ROWS)
    assert len(whole.micro) == 1
    for phase in (phase for phase in federation.context.phases if phase.trains):
        loss, expected = gradients(federation, phase, state, received, whole)
        assert any(gradient.abs().max() > 1e-4 for gradient in expected.values())
        for batch in batches(federation.backbone, rows):
            found_loss, found = gradients(federation, phase, state, received, batch)
            assert found_loss == pytest.approx(loss, abs=1e-11)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@every_method
def test_micro_batches_change_no_gradient(method, tiny_federation):
    one_silo_with_many_lengths = ["partition.silos=1", "data.tasks=[beta]", "server.labels_per_class=10"]
    words = one_silo_with_many_lengths if method in ONE_TASK else []
    compare(doubled(tiny_federation(method, *words)))


@pytest.mark.parametrize(
    ("family", "tuner"),
    [
        pytest.param(family, tuner, marks=() if tuner == "bottleneck" or family == "bert" else pytest.mark.long)
        for family in FAMILIES
        for tuner in ("bottleneck", "lora")
    ],
)
def test_micro_batches_change_no_gradient_in_any_family(family, tuner, tiny_federation, backbone_folder):
    compare(doubled(tiny_federation("fedmcp", f"backbone={backbone_folder(family)}", f"tuner={tuner}")))


def cells(batch):
    return sum(micro_batch.tokens(0) for micro_batch in batch.micro)


def test_batches_are_cut_where_padding_and_calls_cost_least(tiny_federation):
    rows = tiny_federation("fedmcp").silos["gamma"].train["gamma"]
    longest = max(len(ids) for ids in rows.ids)
    real = sum(min(-(-len(ids) // 8) * 8, longest) for ids in rows.ids[:40])  # widths go in steps of 8
    free, usual, dear = (make_batch(rows, range(40), 0, *cost) for cost in ([0], [], [10**6]))
    assert cells(free) == real  # calls that cost nothing: no padding beyond those steps
    assert len(dear.micro) == 1
    assert real <= cells(usual) < cells(dear)
    for batch in (free, usual, dear):
        assert [piece.start for piece in pieces(batch)] == starts(batch)
        for piece in pieces(batch):
            inputs = piece.inputs
            for position, row in enumerate(batch.rows[piece.rows].tolist()):
                mask = inputs["attention_mask"][position]
                length = len(rows.ids[row])
                assert mask.tolist() == [1] * length + [0] * (len(mask) - length)
                assert inputs["input_ids"][position, :length].tolist() == rows.ids[row]
                assert inputs["token_type_ids"][position, :length].tolist() == rows.types[row]


FEDDPA_TOKENS = {
    "cola": (96, 6, 83, 121),
    "fix_punct": (129, 47, 72, 339),
    "web_nlg_en": (132, 35, 76, 284),
}
"""Tokens of some of FedDPA's rows (mean, standard deviation, least, most), estimated at 3.8 characters a token."""


@pytest.mark.parametrize("task", FEDDPA_TOKENS)
def test_a_large_models_batches_have_little_padding_on_a_gpu(task):
    mean, deviation, least, most = FEDDPA_TOKENS[task]
    draws = Random(1)
    lengths = [round(min(max(draws.gauss(mean, deviation), least), most)) for _ in range(300)]
    rows = TokenizedRows(Task(task, ("a", "b")), [[1] * n for n in lengths], None, torch.zeros(300).long())
    ratios = []
    for cost in (call_cost_for(torch.device("cuda"), LLAMA_7B), 2**14):
        batches = epoch_batches({task: rows}, 32, 0, 1, "order", call_cost=cost)
        ratios.append(sum(map(cells, batches)) / sum(lengths))
    assert ratios[0] <= 1.15
    assert ratios[0] < ratios[1]


LLAMA_7B, MINILM = 6_476_005_376, 10_616_832
"""Weights of their linear layers."""


def test_a_call_costs_a_small_model_more_tokens_on_a_gpu():
    assert call_cost_for(torch.device("cuda"), LLAMA_7B) == 85
    assert call_cost_for(torch.device("cuda"), MINILM) == 64 + 2**37 // MINILM
    assert call_cost_for(torch.device("cpu"), LLAMA_7B) == CALL_COST


def test_evaluation_batches_are_cut_the_same_way(tiny_federation):
    rows = tiny_federation("fedmcp").silos["gamma"].train["gamma"]
    free, dear = (list(batching.evaluation_batches(rows, 0, cost, 20)) for cost in (0, 10**6))
    assert sorted(row for batch in free for row in batch.rows.tolist()) == list(range(len(rows)))
    assert all(len(batch.rows) <= 20 for batch in free)
    assert {len(batch.micro) for batch in dear} == {1}
    assert sum(map(cells, free)) < sum(map(cells, dear))


def pieces(batch):
    return [piece for micro_batch in batch.micro for piece in micro_batch.pieces]


def starts(batch):
    rows = [0]
    for micro_batch in batch.micro:
        rows.append(rows[-1] + len(micro_batch))
    return rows[:-1]


# -- dropout: the one thing that is random in a forward ---------------------------------------------------------------


def test_dropout_is_on_in_full_fine_tuning_alone(tiny_federation):
    for method, random in {"fedavg": False, "fedavg-full": True}.items():
        federation = tiny_federation(method)
        silo = federation.silos["gamma"]
        (phase,) = federation.context.phases
        shared = federation.coordinator.shared
        state = shared | federation.context.state_of(silo).private
        leaves = dict(state)
        trained(leaves, phase)
        batch = make_batch(silo.train["gamma"], range(8), 0)
        losses = {float(phase.loss(make_step(federation.context, phase, batch, leaves, shared)).detach()) for _ in "12"}
        assert (len(losses) == 2) is random
        assert not federation.backbone.base.training
        assert len({float(Predictor(federation.context, state).logits(batch).sum()) for _ in "12"}) == 1


def test_dropout_draws_from_the_runs_seed(tiny_federation):
    found = set()
    for process_seed in (1, 2):
        federation = tiny_federation("fedavg-full", "train.steps=2")
        torch.manual_seed(process_seed)
        before = torch.get_rng_state()
        result = federation.trainer.rounds([federation.silos["gamma"]], federation.coordinator.shared, 1)[0]
        assert torch.equal(torch.get_rng_state(), before)
        found.add(digest(flatten(result.state)))
    assert len(found) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("fedmcp",),
        ("fedavg", "cache=frozen-prefix", "tuner=lora", "tuner.sites=encoder.layer.1.attention.self.query"),
        ("fedavg-full", "cohort=1"),
    ],
    ids=lambda words: words[0],
)
def test_gradient_checkpointing_changes_memory_alone(words, tiny_config):
    """A round of a cohort's silos ends with the same numbers; and the key reaches the blocks."""
    found, again = [], []
    for chosen in (False, True):
        federation = build(tiny_config(words[0], "cohort=2", *words[1:], f"train.gradient_checkpointing={chosen}"))
        block = federation.backbone.base.encoder.layer[1]
        again.append("forward" in vars(block) and "checkpoint" in block.forward.__qualname__)
        silos = [federation.silos[name] for name in ("alpha", "beta")][: federation.config.cohort]
        found.append([one.state for one in federation.trainer.rounds(silos, federation.coordinator.shared, 1)])
    assert again == [False, True]
    plain, saving = found
    torch.testing.assert_close(saving, plain, rtol=1e-5, atol=1e-6)
