"""What a model tells before it is given away: bounds against their formulas, and the page of a run."""

from __future__ import annotations

import json
import math

import pytest
import yaml
from scipy.stats import binom, binomtest

from silotune.data.tasks import make_task
from silotune.runs.build.resolve import read_config
from silotune.runs.build.silos import make_canaries
from silotune.runs.release import audit, exact_interval, lower_epsilon, measure_release, membership, upper_epsilon
from silotune.runs.run import run
from tests.support.tiny import BAD, GOOD, tiny_overrides

NOISE = ("privacy.unit=row", "privacy.epsilon=4", "rounds=1", "train.steps=2", "audit.canaries=40")


@pytest.mark.parametrize(("count", "most"), [(100, 3.5), (1000, 5.8)])
def test_all_right_guesses_show_what_the_paper_says(count, most):
    assert lower_epsilon(count, count, 0.0) == pytest.approx(most, abs=0.05)
    assert lower_epsilon(count, count // 2, 0.0) == 0


def test_the_bound_is_where_the_formula_meets_the_confidence():
    count, right, delta = 60, 45, 1e-3
    found = lower_epsilon(count, right, delta)
    rate = math.exp(found) / (1 + math.exp(found))
    tail = sum(binom.pmf(k, count, rate) for k in range(right, count + 1))
    worst = max(sum(binom.pmf(right - j, count, rate) for j in range(1, i + 1)) / i for i in range(1, right + 1))
    assert tail + 2 * count * delta * worst == pytest.approx(0.05, abs=1e-3)
    assert lower_epsilon(count, right, 0.0) > found > lower_epsilon(count, right - 1, delta)


def test_the_guesses_are_the_smaller_half():
    losses = [0.1, 0.9, 0.2, 0.8, 0.3, 0.7]
    found = audit(losses, [True, False, True, False, False, True], 1e-5)
    assert (found.canaries, found.right) == (6, 4)
    assert audit(losses, [True, False] * 3, 1e-5).right == 6


def test_membership_counts_pairs_and_a_threshold():
    found = membership([0.1, 0.2, 0.6], [0.3, 0.4, 0.5, 0.6])
    assert found.auc == pytest.approx((4 + 4 + 0.5) / 12)
    assert found.found == pytest.approx(2 / 3)
    interval = binomtest(2, 3).proportion_ci(0.95, method="exact")
    assert found.interval == pytest.approx((interval.low, interval.high))
    assert exact_interval(0, 5)[0] == 0
    assert exact_interval(5, 5)[1] == 1


def test_canaries_are_the_secrets_and_no_texts_of_rows():
    task = make_task("mood", "test", "classification", ("bad", "good"))
    one, again = (make_canaries(task, 2, 200, "north", b"s" * 32) for _ in range(2))
    other = make_canaries(task, 2, 200, "north", b"t" * 32)
    assert one == again
    assert one.rows != other.rows
    assert 70 < sum(one.present) < 130
    assert {row.label for row in one.rows} == {0, 1}
    assert len({row.texts for row in one.rows}) == len({row.unit for row in one.rows}) == 200
    assert all(len(row.texts) == 2 for row in one.rows)


def test_the_page_of_a_run_with_canaries(silotune, backbone_folder, data_folder, tmp_path):
    words = tiny_overrides("fedavg", backbone_folder("bert"), data_folder)
    done = run(read_config("demo", [*words, *NOISE]), out=tmp_path / "run")
    silo = next(iter(done.summary["silos"]))
    shown = silotune("release", str(tmp_path / "run"), "--silo", silo)
    assert "ε by the account of its noise: 4" in shown.out.replace("3.99", "4")
    assert "of 40 coins guessed; all right would have shown 2.5" in shown.out
    report = json.loads(silotune("release", str(tmp_path / "run"), "--silo", silo, "--json").out)
    assert report["canaries"]["lower"] <= report["upper"] <= 4
    assert report["members"]["rows"][0] > 0


def test_answers_word_for_word(model_folder, tmp_path):
    folder, data = model_folder("llama"), tmp_path / "rows.jsonl"
    rows = [{"instruction": f"the garden was {GOOD[n % 6]}", "output": BAD[n % 5]} for n in range(24)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"name": "north", "path": str(data)}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"silos": [own, own | {"name": "south"}]}))
    words = ("method=fedavg", "tuner=lora", "head=lm", f"backbone={folder}", "rounds=1", "train.steps=1")
    run(read_config(str(tmp_path / "own.yaml"), [*words, "audit.canaries=4"]), out=tmp_path / "run")
    found = measure_release(tmp_path / "run", "north")
    assert found.repeated is not None
    assert (found.repeated[1], found.members.rows) == (14, (14, 5))
    assert any("training answers" in line for line in found.lines())


def test_without_noise_or_canaries_the_page_says_so(silotune, backbone_folder, data_folder, tmp_path):
    words = tiny_overrides("fedper", backbone_folder("bert"), data_folder)
    done = run(read_config("demo", [*words, "rounds=1", "train.steps=1"]), out=tmp_path / "run")
    silo = next(iter(done.summary["silos"]))
    shown = silotune("release", str(tmp_path / "run"), "--silo", silo).out
    assert "∞: some of its tensors were trained without noise" in shown
    assert "the run had no canaries" in shown
    assert "Nothing bounds" in shown
    refused = silotune("release", str(tmp_path), "--silo", silo)
    assert (refused.code, "no finished run there" in refused.err) == (2, True)


def test_weights_that_are_learned_without_noise_have_no_bound(tiny_federation):
    """FDLoRA's, of which its prediction reads no part by name."""
    assert upper_epsilon(tiny_federation("fdlora", "method.sync=1", *NOISE), 1e-5) == math.inf
    assert upper_epsilon(tiny_federation("fedper", *NOISE), 1e-5) <= 4


def test_emptied_canaries_count_as_units(tiny_federation):
    from silotune.training.row_privacy import units_of

    federation = tiny_federation("fedavg", *NOISE)
    plain = tiny_federation("fedavg", *NOISE[:-1])
    for name, silo in federation.silos.items():
        assert len(units_of(silo)) == len(units_of(plain.silos[name])) + 40
        assert silo.rows == plain.silos[name].rows + 40
        assert 0 < silo.empty_units < 40
