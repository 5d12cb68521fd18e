"""Tuned parts in another run's model: against a plain transformers model with LoRA folded in by hand."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pandas
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from silotune.lab.transfer import INFERENCE, OTHER, SENTIMENT, matrix, score_frame
from silotune.lab.transfer_models import open_models
from silotune.runs.run_result import load_run
from tests.support.tiny import LABELS

TASKS = ("alpha", "beta", "gamma")


def frames_of(folders, head="target") -> dict[str, pandas.DataFrame]:
    """Setting → its scores, with source, target and seed as index."""
    groups = open_models(list(folders), head)
    frames = {label: score_frame(label, models, head) for label, models in groups.items()}
    return {label: frame.set_index(["source", "target", "seed"]) for label, frame in frames.items()}


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@cache
def federation_of(folder):
    """A finished run's federation, at its best round."""
    return load_run(folder).federation


def shared(folder) -> dict[str, np.ndarray]:
    """The run's shared tensors, `part/tensor`."""
    state = federation_of(folder).coordinator.shared
    return {f"{part}/{name}": tensor.numpy() for part, tensors in state.items() for name, tensor in tensors.items()}


def score_by_hand(source, head, task, data, backbone) -> float:
    """Accuracy (%) of the plain model with the source's LoRA in its weights and one head over [CLS]."""
    model, tokenizer = AutoModel.from_pretrained(backbone).eval(), AutoTokenizer.from_pretrained(backbone)
    tensors, options = shared(source), federation_of(source).config.tuner.options
    weights = dict(model.named_parameters())
    adapters = sorted({key.split("/")[0] for key in tensors if ".lora_" in key})  # averaged
    assert adapters == ["global", "global_2"]
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        part, name = key.removesuffix(".lora_A.weight").split("/")
        a, b = tensors[key], tensors[f"{part}/{name}.lora_B.weight"]
        weights[f"{name}.weight"].data += torch.from_numpy(options["alpha"] / options["r"] * b @ a) / len(adapters)
    out = shared(head)
    of = next(key for key in LABELS if f"head/{key}.out.weight" in out)
    rows = [json.loads(line) for line in (data / task / "test.jsonl").read_text().splitlines()]
    right = 0
    for row in rows:
        inputs = tokenizer(*(row[key] for key in ("sentence1", "sentence2") if key in row), return_tensors="pt")
        with torch.no_grad():
            state = model(**inputs).last_hidden_state[0, 0].numpy()
        answer = int(np.argmax(out[f"head/{of}.out.weight"] @ state + out[f"head/{of}.out.bias"]))
        right += answer == row["label"]
    return 100 * right / len(rows)


@pytest.mark.parametrize("head", ["target", "source"])
def test_every_cell_is_what_a_plain_model_scores(made, data_folder, backbone_folder, head):
    folders = {task: made("fedavg", task) for task in TASKS}
    (frame,) = frames_of(folders.values(), head).values()
    expected = {}
    for source in TASKS:
        for target in TASKS:
            if head == "source" and len(LABELS[source]) != len(LABELS[target]):
                continue
            reader = folders[target if head == "target" else source]
            hand = score_by_hand(folders[source], reader, target, data_folder, backbone_folder("bert"))
            expected[source, target, 1] = hand
    assert frame["absolute"].to_dict() == pytest.approx(expected)
    relative = {pair: 100 * score / expected[pair[1], pair[1], 1] for pair, score in expected.items()}
    assert frame["relative"].to_dict() == pytest.approx(relative)
    others = {score for (source, target, _), score in expected.items() if source != target}
    assert len(others) > 1  # else nothing would have been told apart


def test_methods_and_tuners_are_groups_of_their_own(made):
    runs = [made(method, task) for method in ("fedavg", "fedfame", "centralised") for task in ("alpha", "beta")]
    runs += [made("fedavg", task, "tuner=bitfit") for task in ("alpha", "beta")]
    frames = frames_of(runs)
    assert list(frames) == ["fedavg, lora", "fedfame, lora", "centralised, lora", "fedavg, bitfit"]
    for number, frame in enumerate(frames.values()):
        for run, task in zip(runs[2 * number :], ("alpha", "beta"), strict=False):
            assert frame["absolute"][task, task, 1] == summary(run)["average"]
        assert len(frame) == 4


@pytest.mark.long
def test_learning_rate_and_alpha_tell_groups_apart_where_tasks_come_twice(made):
    skewed = ("partition=dirichlet", "partition.alpha=2.0")
    twice = [made("fedavg", task, *skewed, *more) for more in ((), ("train.lr=0.01",)) for task in ("alpha", "beta")]
    assert list(open_models(twice)) == ["fedavg, lora, lr 0.03, α 2", "fedavg, lora, lr 0.01, α 2"]
    apart = [made("fedavg", "alpha"), made("fedavg", "beta", "train.lr=0.01")]  # the best rate of each task
    assert list(open_models(apart)) == ["fedavg, lora"]


def test_seeds_are_paired_and_averaged(made):
    folders = [made("fedavg", task, *more) for more in ((), ("seed=2",)) for task in ("alpha", "beta")]
    ((label, frame),) = frames_of(folders).items()
    assert sorted(frame.index) == sorted(
        (source, target, seed) for source in ("alpha", "beta") for target in ("alpha", "beta") for seed in (1, 2)
    )
    transfer_matrix = matrix(label, frame.reset_index())
    assert transfer_matrix.seeds == 2
    for values, means in (("absolute", transfer_matrix.absolute), ("relative", transfer_matrix.relative)):
        one, two = (frame[values]["alpha", "beta", seed] for seed in (1, 2))
        assert means.at["alpha", "beta"] == pytest.approx((one + two) / 2)


def test_a_private_head_in_one_silo_is_one_model(made):
    """Centralised training keeps its head in its only silo."""
    folder = made("centralised", "alpha", "head.scope=private")
    (frame,) = frames_of([folder, made("centralised", "beta", "head.scope=private")]).values()
    assert frame["absolute"]["alpha", "alpha", 1] == summary(folder)["average"]


# -- the numbers that are read off a matrix ----------------------------------------------------------------------------


def cells_of(*cells: tuple[str, str, float, float | None]) -> pandas.DataFrame:
    """Rows of source, target, absolute and relative score."""
    frame = pandas.DataFrame(cells, columns=["source", "target", "absolute", "relative"])
    return frame.astype({"relative": float}).assign(seed=1)


def test_a_matrix_by_hand():
    cells = cells_of(
        *(("SST-2", "SST-2", 80, 100), ("RTE", "SST-2", 60, 75), ("QNLI", "SST-2", 40, 50)),
        *(("RTE", "RTE", 50, 100), ("QNLI", "RTE", 45, 90), ("SST-2", "RTE", 60, 120)),
        *(("QNLI", "QNLI", 70, 100), ("RTE", "QNLI", 49, 70), ("SST-2", "QNLI", 35, 50)),
    )
    transfer_matrix = matrix("fedavg", cells)
    assert transfer_matrix.tasks == ("SST-2", "RTE", "QNLI")
    assert list(transfer_matrix.types.values()) == [SENTIMENT, INFERENCE, INFERENCE]
    assert transfer_matrix.mean() == pytest.approx((75 + 50 + 90 + 120 + 70 + 50) / 6)
    assert transfer_matrix.mean(alike=True) == pytest.approx((90 + 70) / 2)
    assert transfer_matrix.mean(alike=False) == pytest.approx((75 + 50 + 120 + 50) / 4)
    assert transfer_matrix.asymmetry() == pytest.approx((45 + 0 + 20) / 3)  # RTE–SST-2, QNLI–SST-2, QNLI–RTE


def test_tasks_of_unknown_type_are_neither_alike_nor_different():
    score = {("SST-2", "mine"): 10, ("mine", "SST-2"): 20, ("mine", "yours"): 30, ("yours", "mine"): 40}
    score |= {("SST-2", "yours"): 50, ("yours", "SST-2"): 60}
    score |= {(task, task): 100 for task in ("SST-2", "mine", "yours")}
    cells = cells_of(*((s, t, value, value) for (s, t), value in score.items()))
    transfer_matrix = matrix("fedavg", cells)
    assert transfer_matrix.types == {"SST-2": SENTIMENT, "mine": OTHER, "yours": OTHER}
    assert transfer_matrix.mean() == pytest.approx(35)
    assert (transfer_matrix.mean(alike=True), transfer_matrix.mean(alike=False)) == (None, None)
    known = matrix("fedavg", cells, {"SST-2": "a", "mine": "b", "yours": "b"})
    assert (known.mean(alike=True), known.mean(alike=False)) == (35, 35)
    half = matrix("fedavg", cells, {"SST-2": "a", "mine": "b"})
    assert (half.mean(alike=True), half.mean(alike=False)) == (None, 15)


def test_types_stand_together_and_an_own_score_of_0_has_no_relative():
    pairs = [(s, t) for t in ("MRPC", "SST-2", "QQP") for s in ("MRPC", "SST-2", "QQP")]
    cells = cells_of(*((s, t, 0.0 if t == "MRPC" else 50.0, None if t == "MRPC" else 100.0) for s, t in pairs))
    transfer_matrix = matrix("fedavg", cells)
    assert transfer_matrix.tasks == ("SST-2", "MRPC", "QQP")  # in the paper's order, whatever order the runs came in
    assert list(transfer_matrix.relative.dropna(axis="columns")) == ["SST-2", "QQP"]
    assert transfer_matrix.absolute.at["SST-2", "MRPC"] == 0
    assert transfer_matrix.table().rows[0][1][1].text == "0.0 (–)"
    own = matrix("fedavg", cells, {"MRPC": "a", "QQP": "b"})
    assert own.types == {"MRPC": "a", "QQP": "b", "SST-2": OTHER}
    assert own.tasks == ("MRPC", "QQP", "SST-2")
