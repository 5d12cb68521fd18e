"""`summary.json`: all keys of the contract, numbers counted from what was sent, tests taken at the best round."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import yaml

from silotune.config import Config
from silotune.methods import METHODS
from silotune.methods.parts import Table, ZerosLike
from silotune.runs.build import builder as building
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.storage.run_folder import RunFolder
from silotune.runs.summary import state_digest
from silotune.training.local_trainer import LocalTrainer
from tests.support.method_cases import (
    CASES,
    KINDS,
    ONE_TASK_ROWS,
    ROUNDS,
    TEST_ROWS,
    TRAIN_ROWS,
    every_case,
    logged,
    of_kinds,
    read_message,
)

PARAMETERS = {"trainable_parameters", "sent_parameters", "adapter_parameters", "head_parameters"}
NUMBERS = ("rank", "alpha", "fusion_personal", "fusion_global", "mixer")
"""Parts that are neither adapters nor heads; they count with the heads."""
SCORES = {"silos", "global", "average", "best_round"}
KEYS = {"method", "backbone", "seed", "rounds", "engine", "precision", "threads", "seconds", "samples_per_second"}
KEYS |= {"bytes_up", "bytes_down", "shared_sha256", "state_sha256"} | PARAMETERS | SCORES


@every_case
def test_all_keys_of_the_contract(reference, case):
    run, _ = reference(case)
    summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary == run.summary
    assert not KEYS - summary.keys()
    config = run.federation.config
    assert [summary[key] for key in ("method", "backbone", "seed", "rounds", "engine", "precision", "threads")] == [
        CASES[case].method,
        config.backbone.name,
        1,
        ROUNDS,
        "inprocess",
        "fp32",
        1,
    ]
    assert summary["seconds"] > 0
    assert summary["samples_per_second"] > 0
    rows = ONE_TASK_ROWS if CASES[case].one_task else TRAIN_ROWS
    if METHODS[CASES[case].method].labeled_only:
        rows = dict.fromkeys(rows, 8)  # four of each label
    assert summary["silos"].keys() == rows.keys()
    for name, silo in summary["silos"].items():
        assert silo.keys() >= {"metric", "validation", "test", "rows"}
        test = 10 if CASES[case].rows == "asked" else TEST_ROWS
        assert silo["rows"] == {"train": rows[name], "validation": 9, "test": test}
        assert silo["metric"] == {"marked": "span_f1", "asked": "ndcg10"}.get(CASES[case].rows, "accuracy")
    assert summary["global"] is None
    assert summary["average"] == pytest.approx(sum(silo["test"] for silo in summary["silos"].values()) / 3)
    assert all(len(summary[key]) == 64 and int(summary[key], 16) for key in ("shared_sha256", "state_sha256"))


@every_case
def test_bytes_and_parameters_are_those_of_the_messages(reference, case):
    run, wire = reference(case)
    sent = wire.down if wire.up else []
    assert run.summary["bytes_up"] == sum(len(message) for _, _, message in wire.up)
    assert run.summary["bytes_down"] == sum(map(len, sent)) + sum(map(len, wire.final if wire.up else []))
    assert len(sent) == len(wire.up) == (ROUNDS * len(run.federation.silos) if wire.up else 0)
    assert len(wire.final) == CASES[case].ends * len(run.federation.silos)
    logs = logged(run.folder, "silo")
    assert sum(event["bytes_up"] for event in logs) == run.summary["bytes_up"]
    assert sum(event["bytes_down"] for event in logs + logged(run.folder, "final")) == run.summary["bytes_down"]
    sent_by = {}  # silo → what it sent, in any round: RoLoRA's rounds send other parts
    for _, silo, message in wire.up:
        sent_by.setdefault(silo, {}).update({name: t.numel() for name, t in read_message(message)[0].items()})
    assert run.summary["sent_parameters"] == max((sum(sizes.values()) for sizes in sent_by.values()), default=0)
    trained = run.federation.method.changes()  # others only come down, or are fixed
    states = [{part: t for part, t in result.state.items() if part in trained} for result in wire.results.values()]
    sizes = [{part: sum(t.numel() for t in tensors.values()) for part, tensors in state.items()} for state in states]
    assert run.summary["trainable_parameters"] == max(sum(found.values()) for found in sizes)
    tables = {part for part in trained if isinstance(run.federation.context.parts[part].module, Table | ZerosLike)}
    others = {*NUMBERS, *tables}
    heads = [sum(size for part, size in found.items() if part.startswith("head") or part in others) for found in sizes]
    assert run.summary["head_parameters"] == max(heads)
    adapters = {sum(found.values()) - head for found, head in zip(sizes, heads, strict=True)}
    assert max(adapters) == run.summary["adapter_parameters"]
    assert len(adapters) == 1 or run.federation.context.initial.ranks


def test_the_run_folder_says_how_it_was_made(reference):
    run, _ = reference("fedmcp")
    config = yaml.safe_load((run.folder / "config.yaml").read_text(encoding="utf-8"))
    assert Config.model_validate(config) == run.federation.config.model_copy(update={"per_method": {}})
    versions = json.loads((run.folder / "versions.json").read_text(encoding="utf-8"))
    assert versions["torch"] == torch.__version__.split("+")[0] or versions["torch"] == torch.__version__
    assert versions["backbone"] == run.federation.backbone.fingerprint


# -- the best round ----------------------------------------------------------------------------------------------------


@contextmanager
def heads_that_always_say(classes: dict[int, int]):
    """Rounds in which, after training, every head answers one class whatever it reads: round → 0 (first) or −1 (last).

    The tiny data's labels go round in order, so that every split's share of a class is known by hand.
    """

    def constant(train):
        def trained(self, silos, shared, number):
            results = train(self, silos, shared, number)
            for tensors in (tensors for result in results for tensors in result.state.values()):
                for name, tensor in tensors.items():
                    if name.endswith(".out.bias"):
                        tensor.zero_()[classes[number]] = 1e4
            return results

        return trained

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTrainer, "rounds", constant(LocalTrainer.rounds))
        patch.setattr(LocalTrainer, "finals", constant(LocalTrainer.finals))
        yield


def share(rows: int, classes: int, chosen: int) -> float:
    """The percentage of rows 0, 1, 2, … that have the label `chosen` when labels go round."""
    return 100 * sum(row % classes == chosen % classes for row in range(rows)) / rows


def cases(ends: bool) -> list[Any]:
    """Cases of one label a row, with or without a final phase."""
    return of_kinds([name for name, case in CASES.items() if case.ends is ends and not case.rows], KINDS)


@pytest.mark.parametrize("case", cases(ends=False))
def test_tests_are_taken_at_the_best_round_and_digests_at_the_last(federate, case, tmp_path):
    rounds, best = (3, 2) if case == "fedavg" else (2, 1)
    with heads_that_always_say(dict.fromkeys(range(1, rounds + 1), -1) | {best: 0}):
        run = federate.run(case, tmp_path / "run", f"rounds={rounds}", "train.steps=1")
    assert run.summary["best_round"] == best
    for name, silo in run.silos.items():
        classes = 3 if name == "gamma" else 2
        assert silo["test"] == pytest.approx(share(TEST_ROWS, classes, 0))
        assert silo["validation"] == pytest.approx(share(9, classes, 0))
        model = run.model(name)
        text = ("the soup", "was warm") if model.texts_per_row == 2 else "the soup was warm"
        assert model.predict([text])[0].label == model.task.labels[0]
    assert run.summary["average"] == pytest.approx(math.fsum(silo["test"] for silo in run.silos.values()) / 3)
    validation = [event["validation"] for event in logged(run.folder, "round")]
    means = [sum(found.values()) / len(found) for found in validation]
    assert means.index(max(means)) == best - 1
    # The federation stands at the best round; the digest is that of the last one.
    assert state_digest(run.federation) != run.summary["state_sha256"]
    folder = RunFolder(run.folder)
    last = folder.checkpoints.latest()
    assert last.round == rounds
    InProcessEngine(run.federation, folder).load(last)
    assert state_digest(run.federation) == run.summary["state_sha256"]


@pytest.mark.parametrize("case", cases(ends=True))
def test_a_model_that_is_finished_at_the_end_is_judged_there_alone(federate, case, tmp_path):
    with heads_that_always_say({1: 0, 2: -1}):
        run = federate.run(case, tmp_path / "run", "train.steps=1")
    assert run.summary["best_round"] == 2
    first, last = (event["validation"] for event in logged(run.folder, "round"))
    assert first == {}
    assert last.keys() == run.silos.keys()
    for name, silo in run.silos.items():
        classes = 3 if name == "gamma" else 2
        assert silo["test"] == pytest.approx(share(TEST_ROWS, classes, -1))
        assert silo["validation"] == last[name] == pytest.approx(share(9, classes, -1))
    assert state_digest(run.federation) == run.summary["state_sha256"]


def test_the_best_round_is_found_again_after_an_interruption(federate, tmp_path):
    def interrupt(number: int, what: str, done: int, total: int) -> None:
        if (number, done) == (3, 1):
            raise KeyboardInterrupt

    with heads_that_always_say({1: -1, 2: 0, 3: -1, 4: -1}):
        whole = federate.run("fedmcp", tmp_path / "whole", "rounds=4")
        with pytest.raises(KeyboardInterrupt):
            federate.run("fedmcp", tmp_path / "run", "rounds=4", progress=interrupt)
        resumed = federate.run("fedmcp", tmp_path / "run", "rounds=4", resume=True)
    assert resumed.summary["best_round"] == whole.summary["best_round"] == 2
    assert resumed.silos == whole.silos


def test_the_last_round_counts_where_there_are_no_validation_rows(federate, tmp_path, monkeypatch):
    load_silos = building.load_silos

    def without_validation(config: Config):
        silos = load_silos(config)
        for silo in silos:
            silo.splits.validation = []
        return silos

    monkeypatch.setattr(building, "load_silos", without_validation)
    with heads_that_always_say({1: 0, 2: 0, 3: -1}):
        run = federate.run("fedavg", tmp_path / "run", "rounds=3")
    assert run.summary["best_round"] == 3
    for name, silo in run.silos.items():
        assert silo["validation"] is None
        assert silo["rows"] == {"train": TRAIN_ROWS[name], "validation": 0, "test": TEST_ROWS}
        assert silo["test"] == pytest.approx(share(TEST_ROWS, 3 if name == "gamma" else 2, -1))
