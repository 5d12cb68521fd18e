"""Finished runs over tiny models of several families, and the states that silotune computes with them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    T5Config,
)

import silotune
from silotune.data.batching import make_batch
from silotune.data.kinds import Prediction
from silotune.data.rows import Row
from silotune.evaluation.federation_scores import current_model_state
from silotune.evaluation.predict import logits
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import ModelClass, load_backbone
from silotune.models.forward.mixing import make_plan
from silotune.models.tuners import TUNERS
from silotune.runs.run_result import load_run
from tests.support.tiny import FAMILIES, drawn, save, tiny_overrides, write_data

LAYERS = 3  # odd: peft can give every layer of a T5 decoder its own prefix
SINGLE = ["the garden was kind", "the soup seemed awful at last", "a river"]
PAIRS = [("the garden was kind", "and warm"), ("the soup seemed awful at last", "a river"), ("a song", "the train")]
ROWS = {"train": 12, "validation": 4, "test": 4}


def example_words(tuner: str) -> list[str]:
    return [f"tuner.{key}={value}" for key, value in TUNERS[tuner].example.items()]


_KINDS = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}
_CLASSES: dict[str, ModelClass] = {
    "plain": "AutoModel",
    "masked": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForCausalLM",
}
_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def _config(family: str, size: int):
    if family == "gpt2":
        dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        shape = {"n_embd": 32, "n_layer": LAYERS, "n_head": 2, "n_positions": 128, "initializer_range": 0.2}
        return GPT2Config(vocab_size=size, **shape, **_IDS, **dropped)
    if family == "llama":
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "initializer_range": 0.2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
        return LlamaConfig(vocab_size=size, **shape, **heads, **_IDS)
    if family == "t5":
        shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS, "num_heads": 4, "dropout_rate": 0.0}
        return T5Config(vocab_size=size, **shape, **_IDS | {"decoder_start_token_id": 1})
    return FAMILIES[family].model(size).config


def save_model(family: str, kind: str, folder: Path) -> Path:
    """Save a tiny model; `kind` is plain, or masked, causal or seq2seq for a language model's head."""
    tokenizer = FAMILIES[family if family in FAMILIES else "roberta"].tokenizer()
    if family not in FAMILIES:
        tokenizer.eos_token = "</s>"
    model = drawn(lambda: _KINDS.get(kind, AutoModel).from_config(_config(family, len(tokenizer))), family)
    return save(model, tokenizer, folder)


class Runs:
    """Finished runs, each made once and opened again by `load_run`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = write_data(root / "data", ["alpha", "beta"], ROWS)
        self.run = cache(self._run)
        self.model = cache(self._model)
        self.backbone = cache(self._backbone)

    def _model(self, family: str, kind: str = "plain") -> Path:
        return save_model(family, kind, self.root / f"{family}-{kind}")

    def _backbone(self, family: str, kind: str) -> Backbone:
        return load_backbone(str(self.model(family, kind)), precision="fp32", model_class=_CLASSES[kind])

    def _shared(self, family: str, kind: str, overrides: Sequence[str]) -> Backbone | None:
        """The model, loaded once for all runs that leave the section `backbone` alone; None: a run loads its own."""
        return None if any(word.startswith("backbone") for word in overrides) else self.backbone(family, kind)

    def folder(self, family: str, tuner: str, *overrides: str, kind: str = "plain") -> Path:
        """Run and return the run's folder; not cached."""
        place = self.root / f"run-{len(list(self.root.iterdir()))}"
        words = [*self.words(family, tuner, kind), *overrides]
        if any(word.startswith("method=") for word in overrides):
            words.remove("method.adapters=1")
        silotune.run("demo", *words, out=place, backbone=self._shared(family, kind, overrides))
        return place

    def words(self, family: str, tuner: str, kind: str = "plain") -> list[str]:
        """Words of a run of two steps with a large learning rate, so that adapters matter."""
        return [
            *tiny_overrides("fedavg", self.model(family, kind), self.data),
            *("method.adapters=1", "data.tasks=[alpha,beta]", "rounds=1", "train.steps=2", "train.lr=0.1"),
            f"tuner={tuner}",
            *example_words(tuner),
        ]

    def _run(self, family: str, tuner: str, *overrides: str, kind: str = "plain") -> silotune.Run:
        folder = self.folder(family, tuner, *overrides, kind=kind)
        return load_run(folder, self._shared(family, kind, overrides), precision="fp32")

    def generation(self, family: str, kind: str, tuner: str, *overrides: str) -> silotune.Run:
        """Return a finished run of instructions under a language-model head."""
        rows = [{"instruction": f"say {text} {number}", "output": text} for number, text in enumerate(SINGLE * 5)]
        (self.root / "say.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        silo = {"path": str(self.root / "say.jsonl"), "text": "instruction", "label": "output", "kind": "generation"}
        keys = {
            "method": {"name": "fedavg", "adapters": 1},
            "head": {"name": "lm", "max_new_tokens": 5},
            "silos": [{"name": name, "task": "say", **silo} for name in ("east", "west")],
            "train": {"steps": 2, "lr": 0.1, "batch_size": 4, "max_length": 60},
            "rounds": 1,
            "precision": "fp32",
            "backbone": str(self.model(family, kind)),
        }
        path = self.root / "say.yaml"
        path.write_text(yaml.safe_dump(keys))
        place = self.root / f"run-{len(list(self.root.iterdir()))}"
        backbone = self._shared(family, kind, overrides)
        silotune.run(str(path), f"tuner={tuner}", *example_words(tuner), *overrides, out=place, backbone=backbone)
        return load_run(place, backbone)

    def entities(self, family: str, tuner: str, *overrides: str) -> silotune.Run:
        """Return a finished run of two silos whose head marks spans."""
        folder = self.root / "names"
        rows = [{"text": text, "spans": [[0, 3, "PER"], [4, 8, "LOC"]]} for text in SINGLE[:2] * 3]
        for path in (folder / silo / f"{part}.jsonl" for silo in ("alpha", "beta") for part in ("train", "test")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        words = ("head={name: entities}", "data.task=t", "data.labels=[PER,LOC]", f"data.path={folder}")
        return self.run(family, tuner, *words, "data.rows_per_silo=null", "data.merge=false", *overrides)

    def retrieval(self, family: str, tuner: str, *overrides: str) -> silotune.Run:
        """Return a finished run of two silos that find passages."""
        folder = self.root / "questions"
        rows = [{"query": text.split()[1], "passage": text} for text in SINGLE * 4]
        for path in (folder / silo / f"{part}.jsonl" for silo in ("alpha", "beta") for part in ("train", "test")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        words = ("head={name: retrieval}", "data.task=t", f"data.path={folder}")
        return self.run(family, tuner, *words, "data.rows_per_silo=null", "data.merge=false", *overrides)


def tokenised(run: silotune.Run, silo: str, texts):
    """Tokenize texts as the run's head expects them."""
    training = run.federation.context
    tokenize = training.method.setting.head.row_tokenizer(training.backbone, run.federation.config.train.max_length)
    task = run.federation.tasks[silo]
    alone = (lambda text: (text, "")) if task.kind == "generation" else (lambda text: (text,))
    return tokenize(task, [Row(alone(text) if isinstance(text, str) else text, 0) for text in texts])


@torch.no_grad()
def own_states(run: silotune.Run, silo: str, mix, texts) -> list[torch.Tensor]:
    """Return silotune's states of each text under a mix of the run's parts, in the order of the texts."""
    training = run.federation.context
    state = current_model_state(run.federation, run.federation.silos[silo])
    rows = tokenised(run, silo, texts)
    states: list[torch.Tensor] = [torch.zeros(0)] * len(texts)
    for row in range(len(texts)):
        batch = make_batch(rows, [row], 1)
        inputs = {name: tensor for name, tensor in batch.micro[0].inputs.items() if not name.startswith("read_")}
        plan = make_plan(training.backbone, training.resolve(mix, state, {}, {}))
        states[row] = training.backbone.encode(inputs, plan)[0][: len((rows.decoder or rows.ids)[row])]
    return states


def encoded(folder: Path, texts):
    """Encode and pad the texts with the exported tokenizer."""
    columns = [list(column) for column in zip(*((t,) if isinstance(t, str) else t for t in texts), strict=True)]
    return AutoTokenizer.from_pretrained(folder)(*columns, padding=True, return_tensors="pt")


def rows_of(states: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return each row's states without padding and without virtual tokens before the text."""
    states = states[:, states.shape[1] - mask.shape[1] :]
    return [row[: int(real)] for row, real in zip(states, mask.sum(1), strict=True)]


@torch.no_grad()
def states_of(model, folder: Path, texts=PAIRS) -> list[torch.Tensor]:
    """Return the states of each text under a model of transformers or peft; of an encoder-decoder, its encoder's."""
    inputs = encoded(folder, texts)
    body = model.encoder if model.config.is_encoder_decoder else model
    return rows_of(body(**inputs).last_hidden_state, inputs["attention_mask"])


def own_logits(run: silotune.Run, silo: str, texts) -> torch.Tensor:
    """Return silotune's logits of each text by the silo's own model."""
    state = current_model_state(run.federation, run.federation.silos[silo])
    return logits(run.federation.context, state, tokenised(run, silo, texts))


def carried_along(folder: Path):
    """Import the loader `standalone.py` of an export."""
    spec = importlib.util.spec_from_file_location("carried_along", folder / "standalone.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def head_logits(folder: Path, states: list[torch.Tensor]) -> torch.Tensor:
    """Compute the exported head's logits from states by hand."""
    about = json.loads((folder / "head.json").read_text())
    weights = load_file(folder / "head.safetensors")
    pooled = torch.stack([row.mean(0) if about["pooling"] == "mean" else row[0] for row in states])
    if about["kind"] == "mlp":
        pooled = torch.tanh(pooled @ weights["dense.weight"].T + weights["dense.bias"])
    return pooled @ weights["out.weight"].T + weights["out.bias"]


def close(values, expected) -> None:
    """Assert equality to 1e-5 in every number."""
    assert len(values) == len(expected)
    for one, other in zip(values, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def same_probabilities(answers: Sequence[dict], expected: Sequence[Prediction]) -> None:
    """Assert that a loader's answers have the probabilities of silotune's predictions, to 1e-5."""
    for one, other in zip(answers, expected, strict=True):
        assert one["probabilities"] == pytest.approx(other.probabilities, abs=1e-5)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Finished runs, made on demand; see `Runs`."""
    return Runs(tmp_path_factory.mktemp("runs"))
