"""Every method that applies marks spans: it trains, gives the same bits anywhere, and large batches change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, BertModel

from silotune import load_model, run
from silotune.data.loading import load_silos
from silotune.errors import InputError
from silotune.methods import METHODS
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config

REFUSED = {"fedproto", "server-only", "fedfame", "fedavg-server"}
WORDS = ("garden", "letter", "Anna", "Bert", "Cara", "river", "saw", "the", "today")
COMMON = (
    *("head=entities", "train.max_length=32", "threads=1", "precision=fp32", "data.task=t", "rounds=2"),
    *("train.batch_size=4", "train.steps=1", "data.labels=[PER,LOC]", "tuner=lora", "method.adapters=1"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    draws = torch.Generator().manual_seed(0)
    for silo in ("a", "b"):
        (folder / silo).mkdir()
        for part, number in (("train", 12), ("test", 6)):
            lines = []
            for _ in range(number):
                size = int(torch.randint(3, 9, (1,), generator=draws))
                tokens = [WORDS[i] for i in torch.randint(len(WORDS), (size,), generator=draws)]
                tags = ["B-PER" if token[0].isupper() else "O" for token in [*tokens[:-1], "."]]
                lines.append(json.dumps({"tokens": [*tokens[:-1], "."], "tags": tags}))
            (folder / silo / f"{part}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def words_for(method: str, data: Path, backbone: Path) -> list[str]:
    of_method = [word for word in COMMON if word != "method.adapters=1"]
    return [f"method={method}", *of_method, f"data.path={data}", "data.tasks=[a,b]", f"backbone={backbone}"]


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[] if name in ("fedavg", "fedmcp", *REFUSED) else pytest.mark.long) for name in METHODS],
)
def test_every_method_marks_spans_or_refuses(method, data, tmp_path, backbone_folder):
    words = words_for(method, data, backbone_folder("bert"))
    words = [word for word in words if word != "tuner=lora" or method not in ("fedmatch", "ravan")]
    if method in REFUSED:
        with pytest.raises(InputError, match=f"^method={method}: .*texts with marked spans"):
            run("", *words, out=tmp_path / "run")
        return
    whole = run("", *words, out=tmp_path / "run").summary
    assert all(silo["metric"] == "span_f1" and silo["test"] is not None for silo in whole["silos"].values())


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedavg", "fedmcp"])
def test_two_processes_give_the_same_bits(method, data, tmp_path, backbone_folder):
    words = words_for(method, data, backbone_folder("bert"))
    one, two = (run("", *words, out=tmp_path / str(number), workers=number).summary for number in (1, 2))
    assert one["state_sha256"] == two["state_sha256"]


def test_silos_that_are_scored_together_have_their_own_scores(data, tmp_path, backbone_folder):
    words = [*words_for("fedavg", data, backbone_folder("bert")), "train.lr=0.05", "head.scope=private"]
    apart, together = (run("", *words, f"cohort={size}", out=tmp_path / str(size)).summary["silos"] for size in (1, 2))
    assert {name: silo["test"] for name, silo in apart.items()} == {n: silo["test"] for n, silo in together.items()}
    assert any(silo["test"] > 0 for silo in apart.values())


@pytest.mark.parametrize("method", ["fedavg", "moon", "fedmcp"])
def test_small_graphs_have_the_gradients_of_the_whole_batch(method, data, tmp_path, backbone_folder):
    words = [*words_for(method, data, backbone_folder("bert")), "train.optimizer=sgd", "train.lr=0.5", "train.steps=2"]
    whole, pieces = (
        run("", *words, *more, out=tmp_path / str(len(more)))
        for more in ((), (f"train.tokens_at_once={100 if method == 'fedmcp' else 64}",))
    )
    assert load_model(whole.folder, "a").state.keys() == load_model(pieces.folder, "a").state.keys()
    for part, tensors in load_model(whole.folder, "a").state.items():
        for name, tensor in tensors.items():
            other = load_model(pieces.folder, "a").state[part][name]
            torch.testing.assert_close(tensor, other, rtol=0, atol=2e-6)


def test_loss_and_logits_are_those_of_a_plain_loop(data, backbone_folder):
    folder = backbone_folder("bert")
    config = read_config("", words_for("fedavg", data, folder))
    federation = build(config)
    context, silo = federation.context, federation.silos["a"]
    (rows,) = silo.train.values()
    state = context.model_state(silo, federation.coordinator.shared_of("a"))
    from silotune.evaluation.predict import logits, mean_loss

    found = torch.split(logits(context, state, rows), (rows.labels >= 0).sum(1).tolist())
    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()
    layer = {name.rpartition(".")[2]: tensor for name, tensor in state["head"].items()}
    texts = [row.texts[0].split() for row in load_silos(config)[0].splits.train]
    losses = []
    for own, tokens, labels in zip(found, texts, rows.labels, strict=True):
        encoded = tokenizer(tokens, is_split_into_words=True, return_tensors="pt")
        words = encoded.word_ids()
        first = [place for place, word in enumerate(words) if word is not None and words[place - 1] != word]
        with torch.no_grad():
            states = model(**encoded).last_hidden_state[0, first]
        expected = nn.functional.linear(states, layer["weight"], layer["bias"])
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
        losses.append(nn.functional.cross_entropy(expected, labels[labels >= 0]))
    assert mean_loss(context, state, rows) == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)


def test_places_are_those_of_the_text_as_written(data, tmp_path, backbone_folder):
    model = load_model(run("", *words_for("local", data, backbone_folder("bert")), out=tmp_path / "run").folder, "a")
    model.state["head"]["t.out.bias"][1] += 1000  # every word is a span of its own
    texts = {
        "the cafe\u0301 Anna saw": ["the", "cafe\u0301", "Anna", "saw"],
        "Anna,\r\n the river\n": ["Anna", ",", "the", "river"],
        "👩\u200d🔬 Anna": ["👩", "🔬", "Anna"],
        "שלום Anna": ["שלום", "Anna"],
        "the garden Anna saw today . " * 20: ["the", "garden", "Anna", "saw", "today", "."] * 20,  # > train.max_length
        " ": [],
        "": [],
    }
    for text, prediction in zip(texts, model.predict([*texts]), strict=True):
        assert [text[span.start : span.end] for span in prediction.spans] == [span.text for span in prediction.spans]
        assert [span.text for span in prediction.spans if span.text != "\u200d"] == texts[text]


def test_noise_on_rows_takes_them(data, tmp_path, backbone_folder):
    words = [*words_for("fedavg", data, backbone_folder("bert")), "privacy.unit=row", "privacy.epsilon=8"]
    summary = run("", *words, out=tmp_path / "run").summary
    assert summary["privacy"]["epsilon_total"] <= 8
