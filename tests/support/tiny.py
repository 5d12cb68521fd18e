"""Tiny backbones and data for tests: built on the spot from fixed seeds, nothing is downloaded.

A new backbone family joins every suite by one entry of `FAMILIES`, a new method by its entry in `silotune.methods`.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

from silotune.methods import METHODS as _METHODS

METHODS: list[str] = list(_METHODS)
"""Every method's id, for parametrisation."""

UNPARTITIONED = ("partition=none", "partition.silos=10")
"""Words that undo the partition of one task among silos."""
ONE_TASK = {"fedfame", "fedproto", "server-only", "fedavg-server", "ifca"}
"""Methods that share a head or a table by label, and therefore need one task in all silos."""

TASKS = ("alpha", "beta", "gamma")
LABELS = {"alpha": ("bad", "good"), "beta": ("other", "same"), "gamma": ("yes", "maybe", "no")}
ROWS = {"train": 60, "validation": 20, "test": 20}

LAYERS, HIDDEN, ATTENTION_HEADS, INTERMEDIATE, POSITIONS = 2, 32, 2, 64, 128

GOOD = ("bright", "kind", "lovely", "warm", "great", "sweet")
BAD = ("awful", "cold", "dull", "rude", "bitter", "grim")
NOUNS = ("garden", "teacher", "river", "soup", "letter", "train", "song", "market", "winter", "doctor")
VERBS = ("was", "looked", "seemed", "felt", "became")
FILLERS = ("today", "again", "at last", "in the end", "for us", "last week", "without a word", "all the same")
SIGNS = {"yes": ("surely", "indeed"), "maybe": ("perhaps", "possibly"), "no": ("never", "hardly")}


# -- backbones --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Special:
    """A tokenizer's special tokens in the order of their ids."""

    tokens: tuple[str, ...]
    cls: str
    sep: str
    pad: str
    unk: str
    mask: str


@dataclass(frozen=True)
class Family:
    """How to build one family: its tokenizer, and its model for a vocabulary size."""

    tokenizer: Callable[[], PreTrainedTokenizerFast]
    model: Callable[[int], PreTrainedModel]
    types: bool = field(default=False)
    """Whether the tokenizer gives segment ids."""


_BERT = Special(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), "[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")
_ROBERTA = Special(("<s>", "<pad>", "</s>", "<unk>", "<mask>"), "<s>", "</s>", "<pad>", "<unk>", "<mask>")
_STD = 0.2  # larger than the libraries' 0.02: attention and non-linearities then really matter at this width


def words() -> list[str]:
    """The vocabulary of the tiny tasks, in a fixed order."""
    phrases = itertools.chain(GOOD, BAD, NOUNS, VERBS, *SIGNS.values(), *(text.split() for text in FILLERS))
    return list(dict.fromkeys([*phrases, "the", "and", "a"]))


def _wordpiece(special: Special, types: bool, double_separator: bool = False) -> PreTrainedTokenizerFast:
    """WordPiece of the tasks' words, and of single characters so that any lower-case ASCII text can be encoded."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
    vocabulary = [*special.tokens, *characters, *(f"##{character}" for character in characters), *words()]
    ids = {token: number for number, token in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=special.unk))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _wrapped(tokenizer, special, types, double_separator)


def _byte_bpe(special: Special) -> PreTrainedTokenizerFast:
    """Byte-level BPE as in RoBERTa, with a few merges learned from the tasks' words."""
    tokenizer = Tokenizer(models.BPE(unk_token=special.unk))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(special.tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((f" {word}" for word in words()), trainer)
    return _wrapped(tokenizer, special, types=False, double_separator=True)


def _wrapped(tokenizer: Tokenizer, special: Special, types: bool, double_separator: bool) -> PreTrainedTokenizerFast:
    between = f"{special.sep} {special.sep}" if double_separator else special.sep
    second = 1 if types else 0
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{special.cls} $A {special.sep}",
        pair=f"{special.cls} $A {between} $B:{second} {special.sep}:{second}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (special.cls, special.sep)],
    )
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if types else [])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=names,
        model_max_length=POSITIONS,
        cls_token=special.cls,
        sep_token=special.sep,
        pad_token=special.pad,
        unk_token=special.unk,
        mask_token=special.mask,
    )


def _shape(vocabulary: int, positions: int = POSITIONS) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": ATTENTION_HEADS,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": positions,
        "initializer_range": _STD,
    }


def _bert(vocabulary: int) -> PreTrainedModel:
    return BertModel(BertConfig(**_shape(vocabulary)))


def _roberta(vocabulary: int) -> PreTrainedModel:
    # positions count from padding_idx + 1
    shape = _shape(vocabulary, POSITIONS + 2)
    return RobertaModel(RobertaConfig(**shape, type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2))


def _distilbert(vocabulary: int) -> PreTrainedModel:
    shape = {"dim": HIDDEN, "n_layers": LAYERS, "n_heads": ATTENTION_HEADS, "hidden_dim": INTERMEDIATE}
    fixed = {"max_position_embeddings": POSITIONS, "initializer_range": _STD}
    return DistilBertModel(DistilBertConfig(vocab_size=vocabulary, **shape, **fixed))


def _mpnet(vocabulary: int) -> PreTrainedModel:
    shape = _shape(vocabulary, POSITIONS + 2)
    return MPNetModel(MPNetConfig(**shape, pad_token_id=1, bos_token_id=0, eos_token_id=2))


FAMILIES: dict[str, Family] = {
    "bert": Family(lambda: _wordpiece(_BERT, types=True), _bert, types=True),
    "roberta": Family(lambda: _byte_bpe(_ROBERTA), _roberta),
    "distilbert": Family(lambda: _wordpiece(_BERT, types=False), _distilbert),
    "mpnet": Family(lambda: _wordpiece(_ROBERTA, types=False, double_separator=True), _mpnet),
}


def save_backbone(family: str, folder: Path, seed: int = 7) -> Path:
    """Save a tiny backbone and its tokenizer to a folder that `load_backbone` reads."""
    chosen = FAMILIES[family]
    tokenizer = chosen.tokenizer()
    return save(drawn(lambda: chosen.model(len(tokenizer)), family, seed), tokenizer, folder)


def drawn(make: Callable[[], Any], family: str, seed: int = 5) -> Any:
    """Make a model from a seed, whoever drew before, without initial values that would hide mistakes.

    Those are biases of 0, norms of 1 and T5's weights.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = make()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif family == "t5" and "shared" not in name and "relative" not in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return model


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Save a model with its tokenizer and return the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class ReadOnce:
    """`loading._read` that keeps the last models, and returns copies of them while their files stay the same."""

    def __init__(self, read: Callable[..., PreTrainedModel]) -> None:
        self._read = read
        self._models: dict[object, PreTrainedModel] = {}

    def __call__(
        self, name: str, source: str, model_class: str, config: Any, auto: Any, options: dict[str, Any]
    ) -> Any:
        files = [(path, path.stat()) for path in sorted(Path(source).glob("*"))]
        alone = not files or {"device_map", "quantization_config", "gguf_file"} & options.keys()
        if alone or sum(stat.st_size for _, stat in files) > 2**23:
            return self._read(name, source, model_class, config, auto, options)
        states = tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in files)
        key = states, auto, json.dumps(options, default=str, sort_keys=True), str(config)
        if key not in self._models:
            if len(self._models) > 20:
                self._models.pop(next(iter(self._models)))
            self._models[key] = self._read(name, source, model_class, config, auto, options)
        return copy.deepcopy(self._models[key])


# -- data -------------------------------------------------------------------------------------------------------------

Record = dict[str, str | int]


def _sentence(draws: random.Random, noun: str, adjective: str) -> str:
    filler = draws.choice(FILLERS) if draws.random() < 0.6 else ""
    return f"the {noun} {draws.choice(VERBS)} {adjective} {filler}".strip()


def _alpha(draws: random.Random, label: int) -> Record:
    """A single sentence, good or bad by its adjective."""
    adjectives = GOOD if label else BAD
    return {"sentence1": _sentence(draws, draws.choice(NOUNS), draws.choice(adjectives)), "label": label}


def _beta(draws: random.Random, label: int) -> Record:
    """A pair: adjectives of the same kind (1) or not (0); the second sentence begins differently for each."""
    kinds = [GOOD, BAD] if draws.random() < 0.5 else [BAD, GOOD]
    first, second = kinds[0], kinds[0] if label else kinds[1]
    opening = "and" if label else "a"
    one = _sentence(draws, draws.choice(NOUNS), draws.choice(first))
    two = _sentence(draws, draws.choice(NOUNS), draws.choice(second))
    return {"sentence1": one, "sentence2": f"{opening} {two}", "label": label}


def _gamma(draws: random.Random, label: int) -> Record:
    """A pair in three classes; an adverb of the second sentence tells the class."""
    noun = draws.choice(NOUNS)
    sign = draws.choice(SIGNS[LABELS["gamma"][label]])
    one, two = (_sentence(draws, noun, draws.choice(GOOD + BAD)) for _ in range(2))
    return {"sentence1": one, "sentence2": f"{sign} {two}", "label": label}


_MAKERS: dict[str, Callable[[random.Random, int], Record]] = {"alpha": _alpha, "beta": _beta, "gamma": _gamma}


def write_data(folder: Path, tasks: Sequence[str] = TASKS, rows: dict[str, int] = ROWS, seed: int = 3) -> Path:
    """Write the tiny tasks in the layout of `data.path`: a folder per task with its splits and `meta.json`."""
    for task in tasks:
        (folder / task).mkdir(parents=True)
        meta = {"task": task, "label_names": list(LABELS[task]), "metric": "accuracy"}
        (folder / task / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        for split, count in rows.items():
            draws = random.Random(f"{seed}/{task}/{split}")
            records = [_MAKERS[task](draws, number % len(LABELS[task])) for number in range(count)]
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (folder / task / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def tiny_overrides(method: str, backbone: Path, data: Path) -> list[str]:
    """Return the words that turn the preset `demo` into a run of seconds over tiny data and a tiny backbone.

    Methods that share a head need one task: the first one's rows, in three silos. Those that bring a language model's
    head get a classifier instead: the tiny backbones have none.
    """
    classifier = ["head=mlp"] if _METHODS[method].defaults.get("head") in ("verbalizer", "lm") else []
    own_aggregation = _METHODS[method].defaults.get("aggregation", "uniform") not in ("samples", "uniform")
    one_task = ["data.tasks=[alpha]", "partition=iid", "partition.silos=3", "server.labels_per_class=5"]
    return [
        f"method={method}",
        f"backbone={backbone}",
        f"data.path={data}",
        f"data.tasks=[{','.join(TASKS)}]",
        "data.merge=false",
        *([] if own_aggregation else ["aggregation=uniform"]),
        "precision=fp32",
        "threads=1",
        "evaluation.bootstrap=20",  # 1,000 resamples take as long as a silo's rounds
        "rounds=2",
        "train.max_length=32",
        "train.batch_size=8",
        *classifier,
        *(one_task if method in ONE_TASK else []),
    ]
