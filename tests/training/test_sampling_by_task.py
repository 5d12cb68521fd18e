"""Sampling evenly within tasks (FedDPA, appendix A.1), and what is said of silos that no round sampled."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from silotune.data.loading import load_silos
from silotune.errors import InputError
from silotune.lab.personalization import measure_tables
from silotune.lab.report.entries import read_entries
from silotune.lab.report.frame import Results
from silotune.runs.build.builder import build
from silotune.runs.build.coordinator import privacy_guarantee, sampling_groups
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.runs.run_result import load_run
from silotune.training.silo_sampling import SiloSampling
from tests.support.method_cases import logged
from tests.support.tiny import tiny_overrides

TASKS = [f"task{number}" for number in range(8)]
GROUPS = {f"{task}-{part}": task for task in TASKS for part in range(1, 6)}


def choosing(seed=1, **how):
    return SiloSampling(seed, groups=GROUPS, **how)


@pytest.mark.parametrize(("rate", "each"), [(0.2, 1), (0.4, 2), (0.6, 3), (0.8, 4), (1.0, 5)])
def test_as_many_silos_of_every_task_as_the_paper_says(rate, each):
    for number in range(1, 20):
        chosen = choosing(fraction=rate).choose(number, list(GROUPS))
        assert chosen == choosing(count=each).choose(number, list(GROUPS)[::-1]) == sorted(set(chosen))
        assert Counter(GROUPS[name] for name in chosen) == dict.fromkeys(TASKS, each)


def test_tasks_draw_apart_and_every_silo_equally_often():
    rounds = 2000
    choices = [choosing(fraction=0.4).choose(number, list(GROUPS)) for number in range(1, rounds + 1)]
    counts = Counter(name for chosen in choices for name in chosen)
    deviation = (rounds * 0.4 * 0.6) ** 0.5
    assert all(abs(counts[name] - 0.4 * rounds) < 4.5 * deviation for name in GROUPS)
    parts = [
        [name.partition("-")[2] for name in chosen if GROUPS[name] == task] for chosen in choices for task in TASKS
    ]
    alike = np.mean([parts[place] == parts[place + 1] for place in range(0, len(parts), 8)])
    assert 0.05 < alike < 0.15  # two tasks draw the same of 10 pairs by chance alone
    assert choices != [choosing(2, fraction=0.4).choose(number, list(GROUPS)) for number in range(1, rounds + 1)]


@pytest.fixture(scope="module")
def sampled(backbone_folder, data_folder, tmp_path_factory):
    """Three tasks in two silos each, one of them a round; one round."""
    words = tiny_overrides("feddpa-t", backbone_folder("bert"), data_folder)
    words += ["data.parts=2", "sampling.fraction=0.5", "sampling.per_task=true", "rounds=1", "data.tasks=alpha,gamma"]
    return run("demo", *words, out=tmp_path_factory.mktemp("sampled") / "run")


def test_silos_that_were_never_sampled_are_flagged(sampled):
    (event,) = logged(sampled.folder, "round")
    assert Counter(name.partition("-")[0] for name in event["silos"]) == {"alpha": 1, "gamma": 1}
    assert {name for name, silo in sampled.silos.items() if silo["sampled"]} == set(event["silos"])
    assert len(sampled.silos) == 4
    tests = {name: silo["test"] for name, silo in sampled.silos.items()}
    assert sampled.summary["average"] == pytest.approx(np.mean(list(tests.values())))
    assert sampled.summary["average_sampled"] == pytest.approx(np.mean([tests[name] for name in event["silos"]]))
    for name, silo in sampled.silos.items():
        assert (sampled.federation.silos[name].state is not None) is silo["sampled"]
    assert load_run(sampled.folder).silos == sampled.silos


def test_where_all_took_part_there_is_one_average(backbone_folder, data_folder, tmp_path):
    words = [*tiny_overrides("fedlora", backbone_folder("bert"), data_folder), "data.tasks=alpha,gamma", "rounds=3"]
    done = run("demo", *words, "tuner=lora", "train.steps=1", "sampling.count=1", out=tmp_path / "run")
    taken = {name for event in logged(done.folder, "round") for name in event["silos"]}
    assert {name for name, silo in done.silos.items() if silo["sampled"]} == taken
    assert ("average_sampled" in done.summary) is (taken != {"alpha", "gamma"})
    central = [*tiny_overrides("centralised", backbone_folder("bert"), data_folder), "sampling.fraction=0.2"]
    done = run("demo", *central, "sampling.per_task=true", "rounds=1", "train.steps=1", out=tmp_path / "central")
    assert all(silo["sampled"] for silo in done.silos.values())
    assert "average_sampled" not in done.summary


def test_tables_of_many_silos_are_by_task_over_those_that_took_part(tmp_path):
    """Two tasks in seven silos each: one column a task, means over the sampled silos."""
    names = [f"{task}-{part}" for task in ("one", "two") for part in range(7)]
    silos = {
        name: {"test": number, "metric": "rouge1", "sampled": number % 3 == 0, "personalization": float(number),
               "test_time": number / 2, "on_tasks": {}}
        for number, name in enumerate(names)
    }  # fmt: skip
    summary = {"method": "feddpa-t", "seed": 1, "silos": silos, "average": 1.0, "bytes_up": 0}
    summary |= {"bytes_down": 0, "seconds": 1, "best_round": 1}
    summary["tasks"] = {name: {"name": name.partition("-")[0]} for name in names}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "run" / "config.yaml").write_text("{}")
    (tmp_path / "run" / "events.jsonl").write_text("")
    own, others = measure_tables(Results(read_entries([tmp_path / "run"])))
    assert own.header == others.header == ["one", "two", "average"]
    assert [value.text for value in own.rows[0][1]] == ["3.00", "10.50", "6.00"]  # 0, 3, 6 and 9, 12
    assert [value.text for value in others.rows[0][1]] == ["1.50", "5.25", "3.00"]


def test_noise_counts_the_participations_of_silos_drawn_by_task(backbone_folder, data_folder):
    """Both engines promise what follows from the rounds as they will be drawn."""
    words = [*tiny_overrides("fedavg", backbone_folder("bert"), data_folder), "rounds=6", "data.parts=3"]
    words += ["sampling.per_task=true", "sampling.count=1", "uplink=clip,laplace", "uplink.epsilon=1"]
    federation = build(config := read_config("demo", words))
    names = sorted(federation.silos)
    taken = Counter(name for number in range(1, 7) for name in federation.coordinator.choose(number, names))
    assert sum(taken.values()) == 6 * 3
    assert federation.privacy.uses == max(taken.values())
    assert privacy_guarantee(
        config, names, sampling_groups(config, {silo.name: silo.task for silo in load_silos(config)}), labeled=False
    ).uses == max(taken.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sampling.per_task=true",), "give sampling.fraction or sampling.count"),
        (("sampling.per_task=true", "sampling.count=2"), "only 1 of task 'alpha'"),
    ],
)
def test_what_cannot_be_is_said(backbone_folder, data_folder, words, said):
    with pytest.raises(InputError) as error:
        build(read_config("demo", [*tiny_overrides("fedavg", backbone_folder("bert"), data_folder), *words]))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
