"""The rule of verdicts against independent computations, and what a report says by it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy import stats
from sklearn import metrics

from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.lab.report.entries import COMPARISON_FILE, ReportEntry, read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.judging import verdict_table, verdicts
from silotune.lab.report.judging_plan import JudgingPlan
from silotune.lab.report.paired_rows import _score, paired_differences
from silotune.lab.report.verdicts import Differences, judge
from tests.support.report_runs import write_run

LABELS = ["no", "yes"]


def write_rows(folder: Path, rows: dict[str, tuple[Sequence[int], Sequence[int]]]) -> None:
    """Write `predictions.parquet`: silo → true and predicted labels; the summary gets their task."""
    tables = [
        pandas.DataFrame(
            {
                "silo": silo,
                "task": "t",
                "row": range(len(true)),
                "prompt": None,
                "label": [LABELS[label] for label in true],
                "predicted": [LABELS[label] for label in predicted],
                "probabilities": [[1.0 - label, float(label)] for label in predicted],
            }
        )
        for silo, (true, predicted) in rows.items()
    ]
    pandas.concat(tables).to_parquet(folder / "predictions.parquet")
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    task = Task("t", tuple(LABELS), "accuracy", "classification", "yes").fields() | {"texts": ["text"]}
    path.write_text(json.dumps(summary | {"tasks": dict.fromkeys(rows, task)}))


def two_entries(place: Path, right: dict[str, np.ndarray], true: dict[int, np.ndarray]) -> list[ReportEntry]:
    """Two methods whose rows are right as given, shape (seeds, silos, rows)."""
    for method, values in right.items():
        for seed, of_seed in enumerate(values, 1):
            labels = true[seed]
            rows = {f"s{n}": (labels, np.where(row, labels, 1 - labels)) for n, row in enumerate(of_seed)}
            folder = place / f"{method}-{seed}"
            write_run(folder, method, seed, {f"s{n}": 100 * float(row.mean()) for n, row in enumerate(of_seed)})
            write_rows(folder, rows)
    return read_entries([place])


def test_rows_of_a_unit_are_drawn_together(tmp_path):
    """Twenty documents of three equal rows each vary as twenty rows do, against NumPy's draws of documents."""
    draws = np.random.default_rng(4)
    documents = {method: np.repeat(draws.random((1, 1, 20)) < p, 3, axis=2) for method, p in (("a", 0.8), ("b", 0.6))}
    entries = two_entries(tmp_path, documents, {1: np.arange(60) % 2})
    alone = paired_differences(*entries).rows_variance
    for run in (run for entry in entries for run in entry.runs):
        table = pandas.read_parquet(run.folder / "predictions.parquet")
        table.assign(unit=np.repeat(np.arange(20), 3).astype(str)).to_parquet(run.folder / "predictions.parquet")
        run.__dict__.pop("predictions")
    apart = 100 * (documents["a"][0, 0, ::3].astype(float) - documents["b"][0, 0, ::3])
    means = apart[draws.integers(20, size=(20_000, 20))].mean(1)
    together = paired_differences(*entries).rows_variance
    assert math.sqrt(together) == pytest.approx(means.std(), rel=0.1)
    assert together / alone == pytest.approx(3, rel=0.15)


def test_a_row_counts_by_its_weight_and_is_drawn_for_all_silos_together(tmp_path):
    """Against NumPy's own resamples of two silos that weigh the same rows in opposite ways."""
    draws = np.random.default_rng(3)
    true, weights = {1: np.arange(60) % 2}, np.array([0.9, 0.2])[np.stack([np.arange(60) % 2, 1 - np.arange(60) % 2])]
    right = {"mine": draws.random((1, 2, 60)) < 0.8, "theirs": draws.random((1, 2, 60)) < 0.6}
    entries = two_entries(tmp_path, right, true)
    for run in (run for entry in entries for run in entry.runs):
        table = pandas.read_parquet(run.folder / "predictions.parquet")
        table.assign(weight=weights.ravel()).to_parquet(run.folder / "predictions.parquet")
    found = paired_differences(*entries)
    apart = right["mine"][0].astype(float) - right["theirs"][0]
    drawn = draws.integers(60, size=(20_000, 60))

    def mean(rows: np.ndarray) -> np.ndarray:
        return np.mean(
            [100 * (w[rows] * a[rows]).sum(-1) / w[rows].sum(-1) for w, a in zip(weights, apart, strict=True)], 0
        )

    assert found.by_seed == pytest.approx((float(mean(np.arange(60))),))
    assert math.sqrt(found.rows_variance) == pytest.approx(mean(drawn).std(), rel=0.1)
    table.assign(weight=1.0).to_parquet(entries[0].runs[0].folder / "predictions.parquet")
    entries[0].runs[0].__dict__.pop("predictions", None)
    with pytest.raises(InputError, match="tested on different rows"):
        paired_differences(*entries)


def test_words_and_intervals_by_hand() -> None:
    values = (1.0, 2.0, 3.0, 2.5, 1.5)
    half = math.sqrt(stats.t.ppf(0.975, 4) ** 2 * np.var(values, ddof=1) / 5 + stats.norm.ppf(0.975) ** 2 * 0.09)
    word, remark, interval = judge(Differences(values, 0.09, 500), margin=1)
    assert (word, remark, interval) == ("better", "", pytest.approx((2 - half, 2 + half)))
    three = judge(Differences(values, 0.09, 500), margin=1, comparisons=3)[2]
    wider = math.sqrt(
        stats.t.ppf(1 - 0.05 / 6, 4) ** 2 * np.var(values, ddof=1) / 5 + stats.norm.ppf(1 - 0.05 / 6) ** 2 * 0.09
    )
    assert three == pytest.approx((2 - wider, 2 + wider))


@pytest.mark.parametrize(
    ("values", "rows", "word", "remark"),
    [
        ((0.1, 0.2, 0.15, 0.18), 0.01, "equal", ""),  # apart from 0, but within the margin
        ((-3.0, -2.8, -3.1), 0.01, "worse", ""),
        ((2.0, -2.0, 1.0, 0.0), 0.0, "undecided", "seeds would decide"),
        ((0.6, 0.5, 0.7, 0.6), 0.49, "undecided", "no number of seeds decides; about"),
        ((4.0,), 0.01, "undecided", "one seed tells nothing of others"),
        ((0.0, 0.0), 0.0, "equal", ""),
    ],
)
def test_each_word(values: tuple[float, ...], rows: float, word: str, remark: str) -> None:
    judged, advice, _ = judge(Differences(values, rows, 400 if rows else 0), margin=1)
    assert judged == word
    assert remark in advice


def test_advice_decides() -> None:
    """With the number of seeds, or of rows, that a remark names the rule decides; with one seed less it does not."""
    unsure = Differences((2.0, -2.0, 1.0, 0.2))
    seeds = int(judge(unsure, 1)[1].split()[1])
    widths = [unsure.half_width(0.9, number) for number in (seeds, seeds - 1)]
    assert abs(unsure.mean) + widths[0] <= 1 < abs(unsure.mean) + widths[1]
    noisy = Differences((0.6, 0.5, 0.7, 0.6), 0.49, 400)
    rows = int(judge(noisy, 1)[1].split()[-3].replace(",", ""))
    assert stats.norm.ppf(0.975) * math.sqrt(0.49 * 400 / rows) == pytest.approx(0.6, rel=1e-2)


def test_shared_rows_are_drawn_together(tmp_path: Path) -> None:
    """The rows' variance is that of the mean over seeds without what differs by seed, and silos share their rows."""
    generator = np.random.default_rng(3)
    true = dict.fromkeys((1, 2, 3), generator.integers(0, 2, 120))
    hard = generator.random(120)
    right = {
        "fedavg": np.stack([[hard < 0.85] * 2, [hard < 0.8] * 2, [generator.random(120) < 0.8] * 2]),
        "local": np.stack([[hard[::-1] < 0.7] * 2] * 3),
    }
    one, other = two_entries(tmp_path, right, true)
    differences = paired_differences(one, other)
    by_row = 100 * (right["fedavg"][:, 0].astype(float) - right["local"][:, 0])  # (seeds, rows)
    assert differences.by_seed == pytest.approx(by_row.mean(1))
    assert differences.rows == 120  # which both silos have
    own = by_row - by_row.mean(0)
    expected = by_row.mean(0).var() / 120 - own.var(1).sum() / 120 / (3 * 2)
    assert differences.rows_variance == pytest.approx(expected, rel=0.15)


def test_rows_that_differ_by_seed_are_in_the_variance_of_seeds(tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    true = {seed: generator.integers(0, 2, 30) for seed in (1, 2)}
    right = {name: generator.random((2, 1, 30)) < 0.8 for name in ("fedavg", "local")}
    differences = paired_differences(*two_entries(tmp_path, right, true))
    assert (differences.rows_variance, differences.rows) == (0, 0)


def test_scores_of_resamples_are_scikit_learns() -> None:
    generator = np.random.default_rng(5)
    true, predicted = generator.integers(0, 2, (2, 60))
    probabilities = generator.random(60)
    columns = {
        "label": [LABELS[label] for label in true],
        "predicted": [LABELS[label] for label in predicted],
        "probabilities": [[1 - value, value] for value in probabilities],
    }
    drawn = generator.multinomial(60, np.full(60, 1 / 60), 4)
    task = Task("t", tuple(LABELS), "accuracy", "classification", "yes")
    expected = {
        "f1": lambda weight: metrics.f1_score(true, predicted, sample_weight=weight),
        "mcc": lambda weight: metrics.matthews_corrcoef(true, predicted, sample_weight=weight),
        "balanced_accuracy": lambda weight: metrics.balanced_accuracy_score(true, predicted, sample_weight=weight),
        "auroc": lambda weight: metrics.roc_auc_score(true, probabilities, sample_weight=weight),
    }
    for metric, by_hand in expected.items():
        assert _score(task, metric, columns)(drawn) == pytest.approx([100 * by_hand(weight) for weight in drawn])
    with pytest.raises(InputError, match="loss"):
        _score(task, "loss", columns)


def test_reference_correction_and_primary(tmp_path: Path) -> None:
    generator = np.random.default_rng(6)
    true = dict.fromkeys((1, 2, 3), generator.integers(0, 2, 200))
    right = {name: generator.random((3, 1, 200)) < 0.8 for name in ("fedavg", "fedprox", "local")}
    entries = two_entries(tmp_path, right, true)
    alike = verdicts(Results(entries))
    assert [(each.entry, each.reference) for each in alike] == [("fedavg", "local"), ("fedprox", "local")]
    plan = JudgingPlan(primary="fedavg", claim="sharing helps")
    primary, corrected = verdicts(Results(entries, plan=plan))
    assert (primary.primary, corrected.primary) == (True, False)
    width = [each.interval[1] - each.interval[0] for each in (alike[0], primary)]
    assert width[1] < width[0]  # the primary comparison is not corrected for the other one
    table = verdict_table(Results(entries, plan=plan))
    assert table is not None
    assert table.title == "sharing helps: differences in points, margin 1"
    assert "(primary)" in table.frame().iloc[0, -1]
    (first, _) = verdicts(Results(entries, plan=JudgingPlan(seen=(2,))))
    assert first.exploratory
    (first, _) = verdicts(Results(entries, plan=JudgingPlan(seen=(2,), looks=(2, 3))))
    assert not first.exploratory
    with pytest.raises(InputError, match="nobody"):
        verdicts(Results(entries, plan=JudgingPlan(against="nobody")))


def test_what_was_not_kept_is_not_judged(tmp_path: Path) -> None:
    for method in ("fedavg", "local"):
        write_run(tmp_path / method, method, 1, {"a": 50.0})
    (verdict,) = verdicts(Results(read_entries([tmp_path])))
    assert verdict.text.startswith("not judged: no rows kept (predictions.parquet")


def test_a_primary_comparison_is_named_before_the_first_table(tmp_path: Path) -> None:
    (tmp_path / COMPARISON_FILE).write_text(json.dumps({"judging": JudgingPlan().fields()}))
    late = JudgingPlan(primary="fedavg")
    earlier = JudgingPlan.read(tmp_path)
    assert late.settled(earlier) == late  # no table was written yet
    JudgingPlan().look(tmp_path, 3)
    with pytest.raises(InputError, match=r"compare\.primary: was not named"):
        late.settled(JudgingPlan.read(tmp_path))
    assert JudgingPlan(margin=2).settled(JudgingPlan.read(tmp_path)).seen == (3,)


@pytest.mark.parametrize(
    ("seeds", "ratio"), [(3, 1.0), *(pytest.param(*case, marks=pytest.mark.long) for case in ((3, 0.05), (5, 0.3)))]
)
def test_coverage_of_the_interval(seeds: int, ratio: float) -> None:
    """2,000 federations of three and five seeds: the interval covers the truth in 95 % or a little more."""
    generator = np.random.default_rng(7)
    noise = generator.normal(0, np.sqrt(1 / seeds + ratio), 2000)
    spread = generator.chisquare(seeds - 1, 2000) / (seeds - 1)
    covered = 0
    for mean, variance in zip(noise, spread, strict=True):
        offsets = np.linspace(-1, 1, seeds)
        values = mean + offsets * math.sqrt(variance) / np.std(offsets, ddof=1)
        covered += abs(mean) <= Differences(tuple(values), ratio, 100).half_width(0.95)
    assert 94 <= covered / 20 <= 98.5
