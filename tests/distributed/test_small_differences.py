"""Two answers that differ by a few rows, and refusals that count rows: what a coordinator may not get by comparing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.leakage import _rows
from silotune.communication.messages import read_broadcast
from silotune.core.randomness import generator
from silotune.core.serialization import read_tensors
from silotune.core.tensors import flatten
from silotune.distributed.silo.exposure import Exposure, rounded_rows
from silotune.distributed.silo.request_ledger import EXPOSURES_FILE, RequestLedger
from silotune.training.local_trainer import LocalTrainer

SIX = ("fedmcp", "tuner.r=1", "rounds=3", "train.batch_size=8", "train.steps=6")
"""As few steps of as few rows as a policy allows that allows steps at all."""

PARTIAL = {"partial_passes": True, "batches": "any", "effective_rows": 0}
"""Of six steps in a secret order some updates are withheld by chance, which is not looked at here."""

REFUSED = "may differ from one of an earlier run by so few rows × steps; the same steps or epochs, batches, "


def of_rows(attacker, folder, count, long=0):
    """Copy a silo's rows, with another number of training rows, the first ones `long` of more than 60 tokens."""
    shutil.copytree(attacker.settings.rows, folder)
    path = folder / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [[[f"{texts[0]} {number}", *texts[1:]], *rest] for number, (texts, *rest) in enumerate(rows * 3)][:count]
    for row in rows[:long]:
        row[0][0] = "good " * 60
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__steps": 7},
        {"train__steps": 7, "seed": 2},
        {"train__steps": None, "train__epochs": 1},
        {"train__batch_size": 9},
        pytest.param({"train__steps": 7, "train__lr": 1e-4, "train__optimizer": "sgd"}, marks=pytest.mark.long),
        pytest.param({"train__steps": 7, "train__batch_size": 9}, marks=pytest.mark.long),
        pytest.param({"train__steps": 11, "rounds": 4}, marks=pytest.mark.long),
    ],
)
def test_a_run_that_differs_from_an_earlier_one_by_a_few_steps(attack, changes):
    """The difference of the updates would be the gradient of those few rows."""
    assert attack(SIX, policy=PARTIAL).reason() == ""
    attacker = attack(SIX, run="b" * 16, policy=PARTIAL)
    attacker.configure(**changes)
    reason = attacker.reason("hello")
    assert REFUSED in reason
    assert reason.endswith("a difference of at least 256 (policy.row_steps)")
    attacker.restart()
    assert REFUSED in attacker.reason()


@pytest.mark.parametrize("changes", [{"seed": 2}, {"train__steps": 12, "rounds": 4, "train__lr": 1e-4}])
def test_equal_runs_and_very_different_ones_are_answered(attack, changes):
    assert attack(SIX, policy=PARTIAL).reason() == ""
    attacker = attack(SIX, run="b" * 16, policy=PARTIAL)
    attacker.configure(**changes)
    assert attacker.reason() == ""


def test_two_runs_that_both_begin_before_either_trains(attack):
    first, second = attack(SIX, policy=PARTIAL), attack(SIX, run="b" * 16, policy=PARTIAL)
    second.configure(train__steps=7)
    assert [first.reason("hello"), second.reason("hello")] == ["", ""]
    assert first.reason() == ""
    assert REFUSED in second.reason()
    assert first.reason("round", 2) == ""


@pytest.mark.long
def test_the_same_with_a_policy_that_allows_it(attack):
    """What the limit keeps back: one step of eight rows, as the difference of two updates of 48 and 56."""
    lifted = {"row_steps": 0}
    first, second = attack(SIX, policy=PARTIAL | lifted), attack(SIX, run="b" * 16, policy=PARTIAL | lifted)
    second.configure(train__steps=7)
    assert first.ask("round").blobs["message"] != second.ask("round").blobs["message"]


def test_refusals_do_not_count_rows(attack, tmp_path):
    """52 and 60 rows: each of these requests was allowed for one of them alone when rows were counted exactly."""
    reasons = []
    for count in (52, 60):
        rows = of_rows(attack(SIX), tmp_path / str(count), count)
        attacker = attack(
            SIX, share=[], policy=PARTIAL | {"steps": 155}, rows=rows, folder=str(tmp_path / f"state-{count}")
        )
        reasons.append([])
        for changes in (
            {"train__steps": 150},  # 7 or 8 steps an epoch: more than 20 epochs, or fewer
            {"train__steps": None, "train__epochs": 20},  # 140 or 160 steps
            {"train__steps": None, "train__epochs": 1, "train__batch_size": 13},  # 52 × 4 or 60 × 5
        ):
            attacker.configure(**changes)
            reasons[-1].append(attacker.reason("hello"))
        attacker.configure()
        assert attacker.reason() == ""
        for steps in (5, 7, 11, 12):
            attacker.run = "b" * 16
            attacker.configure(train__steps=steps)
            reasons[-1].append(attacker.reason("hello"))
    assert reasons[0] == reasons[1]
    assert [bool(reason) for reason in reasons[0]] == [True, False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("long", "refused"),
    [
        (1, True),
        pytest.param(0, False, marks=pytest.mark.long),
        pytest.param(12, False, marks=pytest.mark.long),
    ],
)
def test_rows_that_are_cut_otherwise(attack, tmp_path, long, refused):
    """Of 33 tokens instead of 32 an answer tells the last token of the only row that is so long."""
    rows = of_rows(attack(SIX), tmp_path / "rows", 60, long)
    settings = {"rows": rows, "folder": str(tmp_path / "state"), "policy": PARTIAL}
    first = attack((*SIX, "train.max_length=32"), **settings)
    assert first.reason() == ""
    second = attack((*SIX, "train.max_length=32"), run="b" * 16, **settings)
    second.configure(train__max_length=33)
    words = "train.max_length=33, which cuts a few rows otherwise than an earlier run did; the same, or at least 10"
    assert (words in second.reason()) is refused
    back = attack(
        (*SIX, "train.max_length=40"), run="c" * 16, folder=str(tmp_path / "other"), rows=rows, policy=PARTIAL
    )
    assert back.reason() == ""
    back.configure(train__max_length=32)
    assert ("cuts a few rows otherwise" in back.reason("hello")) is refused


def test_rounded_rows():
    assert [rounded_rows(rows) for rows in (0, 1, 4, 5, 49, 50, 99, 100, 199, 2500)] == [
        *(0, 1, 2, 5, 20, 50, 50, 100, 100, 2000)
    ]


def of(*phases, batch_size=8):
    return Exposure("rows", phases, batch_size, 128)


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (of(("steps", 6)), of(("steps", 6)), None),
        (of(("epochs", 2)), of(("epochs", 2), batch_size=16), 0),
        (of(("epochs", 2)), replace(of(("epochs", 2)), batches="even"), 0),
        (of(("steps", 6)), of(("steps", 7)), 8),
        (of(("steps", 6)), of(("steps", 30)), 50 * 24),  # as many rows as there are
        (of(("epochs", 1)), of(("epochs", 2)), 50 * 50 / 8),
        (of(("epochs", 1)), of(("steps", 7)), 0),  # nobody outside knows how many steps an epoch has
        (of(("steps", 42)), of(("steps", 29), batch_size=10), 0),  # 300 and 290 of 50 rows, six epochs
        (of(("steps", 6), ("steps", 6)), of(("steps", 6), ("steps", 7)), 8),
        (of(("steps", 6), ("steps", 7)), of(("steps", 7), ("steps", 6)), 16 * 2),
        (of(("steps", 6)), of(("steps", 6), ("epochs", 1)), 50 * 50 / 8),  # another method
    ],
)
def test_differences_of_exposures(one, other, difference):
    for this, that in ((one, other), (other, one)):
        assert this.difference(that, 50) == difference


def test_steps_that_weigh_otherwise(attack, tmp_path):
    """With a warmup of one step, the first batch has no part in an update: the difference of two is that batch's."""
    settings = {"folder": str(tmp_path / "one"), "policy": PARTIAL | {"row_steps": 100}}
    words = (*SIX, "train.steps=12")
    for run, more, refused in (
        ("a", (), False),
        ("b", ("train.warmup=1",), True),
        ("c", ("train.schedule=linear",), True),
        ("d", ("train.lr=0.002",), False),
    ):
        reason = attack((*words, *more), run=run * 16, **settings).reason()
        assert ("may differ from one of an earlier run by so few rows" in reason) is refused, more
        assert refused or reason == ""


def test_a_damaged_record_of_exposures_answers_nothing_more(attack):
    attacker = attack(SIX, policy=PARTIAL)
    assert attacker.reason() == ""
    path = Path(attacker.settings.folder) / EXPOSURES_FILE
    path.write_text(path.read_text(encoding="utf-8") + "{}\n", encoding="utf-8")
    attacker.restart()
    assert "cannot be read (exposures.jsonl)" in attacker.reason("round", 2)


def test_run_ids_leave_no_folders_before_they_are_counted(attack):
    """With `approval: policy` every new id would make one, as often as a coordinator likes."""
    for number in range(3):
        attacker = attack(SIX, run=f"{number:016x}", policy=PARTIAL | {"rounds_in_all": 1})
        attacker.reason("hello")
        attacker.reason("score", 9)
        attacker.reason("round", 9)
        attacker.reason()
    folders = [path.name for path in Path(attacker.settings.folder).iterdir() if path.is_dir()]
    assert folders == ["0" * 16]


def test_short_last_batches_are_refused_by_the_key_alone(attack, tmp_path):
    """Whether the last batch of 56 or of 57 rows is short would be told by a refusal that looked at the rows."""
    words = ("fedmcp", "tuner.r=1", "train.batch_size=8")
    rows = [of_rows(attack(words), tmp_path / str(count), count) for count in (56, 57)]
    reasons = [attack(words, rows=folder, folder=f"{folder}-state").reason("hello") for folder in rows]
    assert "train.batches=full; the rows of a short last batch weigh more" in reasons[0]
    assert reasons[0] == reasons[1]
    assert attack((*words, "train.batches=even"), rows=rows[1], folder=f"{rows[1]}-state").reason() == ""


def test_runs_whose_epochs_are_cut_otherwise(attack):
    """As many passes over the same rows in other batches, and gradients cut at another norm."""
    epoch = ("fedmcp", "tuner.r=1", "rounds=3", "train.batch_size=8", "train.batches=even", "train.clip_norm=1")
    policy = {"batches": "any"}
    assert attack(epoch, policy=policy).reason() == ""
    for number, changes in enumerate(
        ({"train__batch_size": 9}, {"train__batches": "full"}, {"train__clip_norm": 0.9}, {"train__lr": 1e-4})
    ):
        attacker = attack(epoch, run=f"{number:016x}", policy=policy)
        attacker.configure(**changes)
        assert (REFUSED in attacker.reason("hello")) is ("train__lr" not in changes), changes


def test_exposures_of_before_there_were_even_batches(tmp_path):
    ledger = RequestLedger(tmp_path)
    ledger.record_exposure(of(("epochs", 1)))
    path = tmp_path / EXPOSURES_FILE
    path.write_text(path.read_text(encoding="utf-8").replace(', "batches": "full"', ""), encoding="utf-8")
    assert ledger.exposures() == [of(("epochs", 1))]


@pytest.mark.long
def test_a_last_batch_of_one_row_shows_that_rows_gradient(attack, tmp_path):
    """docs/uplink-and-privacy.md, of runs without noise: 57 rows, eight a step, and the seed tells their order."""
    rows, rounds = 57, 8
    words = ("fedavg", "method.adapters=1", "head=linear", "tuner.r=1", f"rounds={rounds}")
    words += ("train.batch_size=8", "train.optimizer=sgd", "train.lr=0.001", "train.epochs=1")
    folder = of_rows(attack(words), tmp_path / "rows", rows)
    attacker = attack(
        words, run="b" * 16, rows=folder, policy={"row_order": "seed", "batches": "any", "effective_rows": 0}
    )
    phase, seed = attacker.federation.context.phases[0].name, attacker.federation.config.seed
    before = numbers(attacker.broadcast(add=0.1))
    changes, last = [], []
    for number in range(1, rounds + 1):
        reply = attacker.ask("round", number, broadcast=attacker.broadcast(number, add=0.1))
        changes.append(numbers(reply.blobs["message"]) - before)
        order = torch.randperm(rows, generator=generator(seed, "batches", "alpha", number, phase, 0))
        last.append(int(order[-1]))
    federation = attacker.session._setup.federation
    (silo,) = federation.silos.values()
    shared = read_broadcast(attacker.broadcast(add=0.1), attacker.federation.coordinator.expected)[0]
    gradients = []
    for row in last:
        alone = replace(silo, train={"alpha": _rows(silo.train["alpha"], [row])}, state=None)
        (result,) = LocalTrainer(federation.context).rounds([alone], shared, 1)
        after = {name: result.state[name] for name in shared}
        gradients.append(
            torch.cat([tensor.double().reshape(-1) for _, tensor in sorted(flatten(after).items())]) - before
        )
    told, own = torch.stack(changes), torch.stack(gradients)
    similar = torch.cosine_similarity(told - told.mean(0), own - own.mean(0))
    assert similar.min() > 0.95, similar  # the head is private, and moves from round to round


def numbers(message):
    """All numbers of a message, by the names of its tensors."""
    return torch.cat([tensor.double().reshape(-1) for _, tensor in sorted(read_tensors(message).items())])
