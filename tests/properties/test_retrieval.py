"""Every method that applies finds passages: it trains, its batches are not cut, and noise is on losses by row alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from silotune import load_model, run
from silotune.data.rows import Row
from silotune.errors import InputError
from silotune.methods import METHODS
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from tests.properties.test_rows_do_not_couple import vectors_of

REFUSED = {"fedproto", "server-only", "fedfame", "fedavg-server", "ifca"}
WORDS = ("garden", "letter", "Anna", "Bert", "Cara", "river", "saw", "the", "today")
OWN = ("head.in_batch=false", "head.negatives=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    draws = torch.Generator().manual_seed(0)

    def text() -> str:
        size = int(torch.randint(3, 9, (1,), generator=draws))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (size,), generator=draws))

    for silo in ("a", "b"):
        (folder / silo).mkdir()
        for part, number in (("train", 12), ("test", 6)):
            rows = [
                {"query": text(), "passage": text(), "negatives": [text() for _ in range(1 + place % 3)]}
                for place in range(number)
            ]
            (folder / silo / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def words_for(method: str, data: Path, backbone: Path, *more: str) -> list[str]:
    return [
        *(f"method={method}", f"data.path={data}", "data.tasks=[a,b]", "data.task=t", f"backbone={backbone}"),
        *("head=retrieval", "train.max_length=32", "threads=1", "precision=fp32", "rounds=2", "train.batch_size=4"),
        *(
            "train.steps=1",
            "evaluation.bootstrap=20",
            *([] if method in ("fedmatch", "ravan") else ["tuner=lora"]),
            *more,
        ),
    ]


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[] if name in ("fedavg", *REFUSED) else pytest.mark.long) for name in METHODS],
)
def test_every_method_finds_passages_or_refuses(method, data, tmp_path, backbone_folder):
    words = words_for(method, data, backbone_folder("bert"))
    if method in REFUSED:
        with pytest.raises(InputError, match=f"^method={method}: .*queries with passages"):
            run("", *words, out=tmp_path / "run")
        return
    whole = run("", *words, out=tmp_path / "run").summary
    assert all(silo["metric"] == "ndcg10" and 0 < silo["test"] <= 100 for silo in whole["silos"].values())
    if method == "fedavg":
        baselines = whole["baselines"]["silos"]["a"]
        assert baselines.keys() == {"bm25", "untouched"}
        assert whole["silos"]["a"]["rows"]["test"] == 6


@pytest.mark.parametrize("method", ["fedavg", "fedmcp"])
def test_small_graphs_have_the_gradients_of_the_whole_batch(method, data, tmp_path, backbone_folder):
    more = ("train.optimizer=sgd", "train.lr=0.5", "train.steps=2")
    words = words_for(method, data, backbone_folder("bert"), *more)
    small = f"train.tokens_at_once={100 if method == 'fedmcp' else 64}"
    whole, pieces = (
        load_model(run("", *words, *own, out=tmp_path / str(len(own))).folder, "a").state for own in ((), (small,))
    )
    for part, tensors in whole.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, pieces[part][name], rtol=0, atol=2e-6)


def test_noise_takes_own_negatives_alone(data, tmp_path, backbone_folder):
    noised = words_for("fedavg", data, backbone_folder("bert"), "privacy.unit=row", "privacy.epsilon=8")
    with pytest.raises(InputError, match=r"head=retrieval couples the rows of a batch; .*head\.in_batch=false"):
        run("", *noised, out=tmp_path / "refused")
    assert run("", *noised, *OWN, out=tmp_path / "run").summary["privacy"]["epsilon_total"] <= 8


def test_no_bit_of_a_row_follows_other_rows(data, backbone_folder):
    made = build(read_config("", words_for("fedavg", data, backbone_folder("bert"), *OWN)))
    context, silo = made.context, made.silos["a"]
    ((task, rows),) = silo.train.items()
    tokenize = context.head.row_tokenizer(context.backbone, 32)
    others = [Row(("the",), 0, target=("river " * n, ("saw",) * n, ())) for n in range(1, rows.examples)]
    other = tokenize(rows.task, others)
    assert {*rows.sizes, *other.sizes} == {4}
    rows, names = replace(rows, units=None), [str(n) for n in range(rows.examples)]
    first = tokenize(rows.task, [Row(("Anna saw",), 0, target=("the garden", ("a letter", "today"), ()))])
    joined = [replace(first.concatenated(rest), units=names) for rest in (other, tokenize(rows.task, others[::-1]))]
    one, two = (vectors_of(made, replace(silo, train={task: each})) for each in joined)
    assert torch.equal(one[0], two[0])
    assert not torch.equal(one[1], two[1])
    assert (one[0] != 0).any()
