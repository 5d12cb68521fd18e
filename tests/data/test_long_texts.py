"""Texts in windows: those of a cut by hand, outputs of a plain loop; alike in cohorts, exports and servers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, BertModel

from silotune import load_model, run
from silotune.data.loading import load_silos
from silotune.errors import InputError
from silotune.evaluation.joint import read
from silotune.evaluation.predict import Predictor, logits, mean_loss
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.serve.jobs import Score
from silotune.training.phase_batches import drawn_windows
from tests.serve.test_engine import ask, engine

LENGTH, OVERLAP, ROOM = 12, 4, 10
COMMON = (
    *("data.merge=false", "tuner=lora", "threads=1", "precision=fp32", "data.task=t", "rounds=2", "data.tasks=[a,b]"),
    *(
        "train.batch_size=4",
        "train.steps=2",
        "method.adapters=1",
        "evaluation.bootstrap=0",
        f"train.max_length={LENGTH}",
    ),
)
WINDOWS = ("data.long_texts=windows", f"data.window_overlap={OVERLAP}", "data.windows_per_row=2")
WORDS = ("garden", "letter", "anna", "bert", "river", "zebra", "the", "today", "kind")
KINDS = {
    "linear": (),
    "mlp": ("head.normalize=3", "head.pooling=mean"),
    "entities": ("data.labels=[PER,LOC]",),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows of 3 to 40 words, among them words of several tokens, with a label or with tags: `labels/a`, `tags/a`, …"""
    folder = tmp_path_factory.mktemp("long")
    draws = torch.Generator().manual_seed(0)
    for silo in ("a", "b"):
        for kind in ("labels", "tags"):
            (folder / kind / silo).mkdir(parents=True)
        (folder / "labels" / silo / "meta.json").write_text('{"label_names": ["no", "yes"]}')
        for part, number in (("train", 12), ("validation", 4), ("test", 6)):
            rows = {"labels": [], "tags": []}
            for _ in range(number):
                size = int(torch.randint(3, 41, (1,), generator=draws))
                tokens = [WORDS[i] for i in torch.randint(len(WORDS), (size,), generator=draws)]
                rows["labels"].append({"sentence1": " ".join(tokens), "label": int("anna" in tokens)})
                tags = ["B-PER" if token in ("anna", "bert") else "O" for token in tokens]
                rows["tags"].append({"tokens": tokens, "tags": tags})
            for kind, lines in rows.items():
                (folder / kind / silo / f"{part}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.fixture
def words(data, backbone_folder):
    def of(head, *more, windows=WINDOWS):
        path = data / ("tags" if head == "entities" else "labels")
        own = (
            "method=fedavg",
            f"head={head}",
            *KINDS[head],
            f"backbone={backbone_folder('bert')}",
            f"data.path={path}",
        )
        return [*COMMON, *own, *windows, *more]

    return of


def by_hand(tokenizer, text):
    """A text's windows and where each begins: `ROOM` tokens, of which the next one has `OVERLAP` again."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    begins = [0]
    while begins[-1] + ROOM < len(ids):
        begins.append(begins[-1] + ROOM - OVERLAP)
    around = tokenizer.cls_token_id, tokenizer.sep_token_id
    return [[around[0], *ids[begin : begin + ROOM], around[1]] for begin in begins], begins


def plain(head, tensors, tokenizer, model, text):
    """A row's outputs by a loop over its windows."""
    windows, begins = by_hand(tokenizer, text)
    with torch.no_grad():
        states = [model(input_ids=torch.tensor([own])).last_hidden_state[0] for own in windows]
    if head == "entities":
        found, last = [], None
        for at, word in enumerate(tokenizer(text, add_special_tokens=False).word_ids()):
            if word == last:
                continue
            last, best = word, (-1, 0, 0)
            for number, (own, begin) in enumerate(zip(windows, begins, strict=True)):
                place = at - begin + 1
                if 0 < place < len(own) - 1 and min(place, len(own) - 1 - place) > best[0]:
                    best = min(place, len(own) - 1 - place), number, place
            found.append(states[best[1]][best[2]])
        return nn.functional.linear(torch.stack(found), tensors["t.out.weight"], tensors["t.out.bias"])
    outputs = []
    for own in states:
        x = own.mean(0) if head == "mlp" else own[0]
        if head == "mlp":
            x = torch.tanh(nn.functional.linear(3 * x / x.norm(), tensors["t.dense.weight"], tensors["t.dense.bias"]))
        outputs.append(nn.functional.linear(x, tensors["t.out.weight"], tensors["t.out.bias"]))
    return torch.stack(outputs).mean(0)


@pytest.mark.parametrize("head", KINDS)
def test_windows_and_outputs_are_those_of_a_plain_loop(head, words, backbone_folder):
    config = read_config("", words(head))
    made = build(config)
    context, silo, folder = made.context, made.silos["a"], backbone_folder("bert")
    (rows,) = silo.train.values()
    state = context.model_state(silo, made.coordinator.shared_of("a"))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()
    texts = [row.texts[0] for row in load_silos(config)[0].splits.train]
    assert rows.most_windows > 3
    for row, text in enumerate(texts):
        assert [rows.ids[row][start:end] for start, end in rows.spans(row)] == by_hand(tokenizer, text)[0]
    expected = [plain(head, state["head"], tokenizer, model, text) for text in texts]
    found = logits(context, state, rows)
    torch.testing.assert_close(
        found, torch.cat(expected) if head == "entities" else torch.stack(expected), rtol=0, atol=1e-5
    )
    labels = [own[own >= 0] for own in rows.labels] if head == "entities" else rows.labels
    losses = [nn.functional.cross_entropy(own, label) for own, label in zip(expected, labels, strict=True)]
    assert mean_loss(context, state, rows) == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)
    predictor = Predictor(context, state)
    views = read([(predictor, rows), (predictor, rows.first(5))])  # as a server reads several models
    for view, own in zip(views, (rows, rows.first(5)), strict=True):
        torch.testing.assert_close(predictor.logits_of(view, rows.task), logits(context, state, own), rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", ["linear", "entities"])
def test_windows_of_training_are_drawn_by_round_and_row(head, words):
    made = build(read_config("", words(head)))
    silo = made.silos["a"]
    (rows,) = silo.train.values()
    drawn = [next(iter(drawn_windows(made.context, silo, "a", number, "train").values())) for number in (1, 1, 2)]
    assert drawn[0].ids == drawn[1].ids != drawn[2].ids
    for row, lengths in enumerate(drawn[0].windows):
        assert len(lengths) == min(2, rows.passes(row))
        whole = [rows.ids[row][start:end] for start, end in rows.spans(row)]
        assert all(drawn[0].ids[row][start:end] in whole for start, end in drawn[0].spans(row))
    (fewer,) = drawn_windows(made.context, replace(silo, train={"t": rows.first(3)}), "a", 1, "train").values()
    assert fewer.ids == drawn[0].ids[:3]
    if head == "entities":
        for row, reads in enumerate(drawn[0].reads):
            kept = drawn[0].labels[row] >= 0
            assert len(reads) == int(kept.sum()) <= len(rows.reads[row])
            before = [
                rows.ids[row][at] for at, own in zip(rows.reads[row], kept[rows.labels[row] >= 0], strict=True) if own
            ]
            assert [drawn[0].ids[row][at] for at in reads] == before


@pytest.mark.parametrize("head", ["mlp", "entities"])
@pytest.mark.parametrize("more", [("cohort=2",), ("train.tokens_at_once=48",), ("cohort=2", "train.tokens_at_once=48")])
def test_cohorts_and_small_graphs_have_the_same_gradients(head, more, words, tmp_path):
    given = words(head, "train.optimizer=sgd", "train.lr=0.1")
    whole, other = (run("", *given, *own, out=tmp_path / str(len(own))) for own in ((), more))
    for silo in ("a", "b"):
        one, two = (load_model(each.folder, silo).state for each in (whole, other))
        for part, tensors in one.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(tensor, two[part][name], rtol=0, atol=2e-6)


@pytest.mark.parametrize("head", KINDS)
def test_models_and_exports_read_windows(head, words, tmp_path, silotune):
    folder = run("", *words(head, "rounds=1", "train.steps=1"), out=tmp_path / "run").folder
    model = load_model(folder, "a")
    text = " ".join(WORDS) * 4
    (prediction,) = model.predict([text])
    wanted = "spans" if head == "entities" else "labels"
    with engine(folder) as running:
        (served,), (refused,) = ask(running, [("a", Score([own], wanted)) for own in (text, text * 100)])
    assert served.predictions[0].spans == prediction.spans
    assert served.predictions[0].probabilities == pytest.approx(prediction.probabilities, abs=1e-5)
    assert refused.message.endswith("windows of 12 tokens; allowed: 256")
    if head == "entities":
        model.state["head"]["t.out.bias"][1] += 1000
        (prediction,) = model.predict([text])
        assert [span.text for span in prediction.spans] == text.split()
    else:
        outputs = logits(model.context, model.state, model.encoded([text]))
        assert prediction.probabilities["yes"] == pytest.approx(float(outputs.softmax(-1)[0, 1]))
        assert model.encoded([text]).most_windows > 3
    found = silotune("export", folder, "--silo", "a", "--part", "mixed", "--to", tmp_path / "export")
    assert found.code == 0, found.err
    assert "4 of 4 have the same answer" in " ".join((found.out + found.err).split())


REFUSED = [
    (
        "linear",
        ("data.long_texts=refuse",),
        r"silo 'a', \w+ rows: \d+ of \d+ rows have more than 12 tokens .*longest \d+",
    ),
    ("linear", ("data.long_texts=windows", "data.window_overlap=10"), "window_overlap=10: .*allowed: less than 10"),
    ("linear", (*WINDOWS, "cache=frozen-prefix"), "cache=frozen-prefix: keeps no windows"),
    ("linear", ("data.window_overlap=3",), "window_overlap belongs to long_texts=windows"),
    ("linear", (*WINDOWS, "train.tokens_at_once=23"), "a row of 12 tokens in 2 windows holds 24"),
    (
        "linear",
        (*WINDOWS, "head=verbalizer"),
        r"long_texts=windows: head=verbalizer .*cut, or head=entities\|linear\|mlp",
    ),
]


@pytest.mark.parametrize(("head", "given", "message"), REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(head, given, message, words):
    with pytest.raises(InputError, match=message):
        build(read_config("", words(head, windows=given)))


def test_pairs_are_refused(tiny_config):
    with pytest.raises(InputError, match=r"^silo 'beta', .*windows: a row is a pair of texts; allowed: cut or refuse"):
        build(tiny_config("fedavg", "data.tasks=[beta]", "data.long_texts=windows"))


def test_the_data_command_says_what_windows_cost(words, silotune):
    found = json.loads(silotune("data", "", *words("linear"), "--json").out)["silos"]["a"]["tokens"]["windows"]
    (rows,) = build(read_config("", words("linear"))).silos["a"].train.values()
    passes = [rows.passes(row) for row in range(len(rows))]
    assert found["longer"] == sum(own > 1 for own in passes)
    assert found["passes"] == pytest.approx(sum(passes) / 12)
    assert found["trained"] == pytest.approx(sum(min(own, 2) for own in passes) / 12)
    assert found["work"] == pytest.approx(sum(map(len, rows.ids)) / sum(min(LENGTH, len(own)) for own in rows.ids))
    shown = " ".join(silotune("data", "", *words("linear")).out.split())
    assert "in windows of 12 tokens" in shown
    assert f"{found['passes']:.1f} forward passes a row" in shown
