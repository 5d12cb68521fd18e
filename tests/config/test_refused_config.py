"""Bad configuration is refused in one line that names the key and what is allowed; a command ends with code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune import InputError, read_config
from silotune.config.data import AttackConfig
from tests.support.command_line import Refused, Silotune, change_silo

RUN = ("run", "federation.yaml", "--out", "out")
ATTACK = ("attack=backdoor", "attack.target=good")

WORDS: dict[str, tuple[list[str], list[str]]] = {
    # values out of range
    "lr-nan": (["train.lr=.nan"], ["train.lr", "finite"]),
    "device-unknown": (["device=gpu"], ["device", "allowed: auto, cpu, cuda, cuda:N"]),
    "threads-absurd": (["threads=1000000000"], ["threads", "1024"]),
    "dropout-whole": (["train.dropout=1"], ["train.dropout", "own", "from 0 to below 1", "got 1"]),
    "dropout-word": (["train.dropout=all"], ["train.dropout", "own", "all"]),
    "warmup-fraction": (["train.warmup=2.5"], ["train.warmup", "a number of steps, or a share below 1", "2.5"]),
    "schedule-unknown": (["train.schedule=step"], ["train.schedule", "constant", "linear", "cosine", "step"]),
    "schedule-over-nothing": (
        ["train.schedule_over=run"],
        ["train", "schedule_over", "train.schedule or train.warmup"],
    ),
    "sgd-keeps-nothing": (
        ["train.keep_optimizer=true", "train.optimizer=sgd"],
        ["train", "keep_optimizer", "optimizer=sgd keeps no state but momentum", "train.momentum"],
    ),
    "class-weights-word": (["train.class_weights=even"], ["train.class_weights", "none, balanced", "even"]),
    "class-weight-zero": (["train.class_weights={good: 0}"], ["train.class_weights", "'good'", "above 0"]),
    "class-weight-yes": (["train.class_weights={yes: 2}"], ["train.class_weights", "quotes"]),
    "ratio-sum": (["data.ratio=[0.6,0.2,0.3]"], ["data.ratio", "sum to 1"]),
    "ratio-zero": (["data.ratio=[0.8,0.2,0]"], ["data.ratio", "positive"]),
    "fraction-and-count": (["sampling.fraction=0.5", "sampling.count=1"], ["sampling", "fraction", "count"]),
    "memory-gone": (["state.memory_mib=64"], ["state.memory_mib", "removed", "Leave the key out"]),
    # wrong kinds
    "rounds-text": (["rounds=many"], ["rounds", "integer", "many"]),
    "rounds-yes": (["rounds=yes"], ["rounds", "number", "True"]),
    "rounds-group": (["rounds.x=2"], ["rounds", "integer"]),
    "lr-empty": (["train.lr="], ["train.lr", "number", "None"]),
    "train-plain": (["train=5"], ["train", "group of keys", "batch_size"]),
    "backbone-number": (["backbone=5"], ["backbone", "string"]),
    "silos-plain": (["silos=north.csv"], ["silos", "list"]),
    "option-yes": (["method.mu=on"], ["method.mu", "number"]),
    "date-that-is-none": (["seed=2001-99-99"], ["seed", "integer"]),
    # set where it means nothing
    "vain-beta": (
        ["server.beta1=0.5"],
        ["server", "beta1 belongs to server.optimizer=avgm or", "leave server.beta1 out"],
    ),
    "vain-mib": (["cache.mib=9"], ["mib belongs to cache=frozen-prefix, not to cache=none"]),
    "home-of-nobody": (["silos=[]", "data.path=~nobody-of-this-name/x"], ["~nobody-of-this-name/x", "no user"]),
    # unknown names
    "method": (["method=fedmpc"], ["method 'fedmpc'", "did you mean 'fedmcp'", "fedavg", "local"]),
    "method-none": (["method="], ["method.name", "string"]),
    "head": (["head=mpl"], ["head.name", "'mlp'", "'linear'", "mpl"]),
    "precision": (["precision=fp8"], ["precision", "'bf16'", "fp8"]),
    "sites": (["tuner=lora", "tuner.sites=query,values"], ["tuner.sites", "'values'", "value"]),
    "sites-plain": (["tuner=lora", "tuner.sites=5"], ["tuner.sites", "query"]),
    "sites-of-bottleneck": (["tuner.sites=query"], ["tuner.sites", "'houlsby'", "'pfeiffer'"]),
    "attention": (["backbone.attention=paged"], ["backbone.attention", "'eager', 'sdpa' or 'flash'", "paged"]),
    "quantization": (
        ["backbone.quantization=int3"],
        ["backbone.quantization: must be 'none', 'auto', 'int8', 'nf4' or 'int8-torchao' (got 'int3')"],
    ),
    # unknown keys, at every depth
    "key-of-backbone": (["backbone.revison=v2"], ["'backbone.revison'", "did you mean 'backbone.revision'"]),
    "key": (["round=3"], ["'round'", "did you mean 'rounds'", "seed"]),
    "key-of-transformers": (["train.learning_rate=1"], ["'train.learning_rate'", "did you mean 'train.lr'"]),
    "key-of-peft": (["tuner=lora", "tuner.lora_alpha=1"], ["'tuner.lora_alpha'", "did you mean 'tuner.alpha'"]),
    "key-of-others": (["model=bert-base-uncased"], ["'model'", "did you mean 'backbone'"]),
    "key-inside": (["train.batchsize=1"], ["'train.batchsize'", "did you mean 'train.batch_size'", "train.lr"]),
    "key-below-a-value": (["train.lr.min=1"], ["train.lr", "number"]),
    "key-of-method": (["method.gama=0.5"], ["'method.gama'", "did you mean 'method.gamma'", "method.mu"]),
    "key-of-another-method": (["method=fedavg", "method.gamma=0.5"], ["'method.gamma'", "method.adapters"]),
    "key-of-tuner": (["tuner.rank=4"], ["'tuner.rank'", "tuner.r"]),
    "key-of-full": (["tuner=full", "tuner.r=4"], ["'tuner.r'", "allowed"]),
    "key-of-per-method": (["method=local", "per_method.local.train.lrr=1"], ["'train.lrr'", "train.lr"]),
    "per-method-unknown": (
        ["per_method.fedavgg.train.lr=1"],
        ["'per_method.fedavgg'", "did you mean 'per_method.fedavg'"],
    ),
    "per-method-plain": (["per_method.fedavg=1"], ["per_method.fedavg", "group of keys"]),
    "per-method-not-a-group": (["per_method=1"], ["per_method", "methods"]),
    "per-method-method": (["per_method.fedavg.method=local"], ["per_method.fedavg", "method"]),
    # keys of other sections
    "key-elsewhere": (["lr=1e-3"], ["did you mean 'train.lr' or 'server.lr'?"]),
    "key-mistyped-elsewhere": (["epoch=3"], ["did you mean 'train.epochs'?"]),
    "key-of-the-tuner": (["train.alpha=1"], ["'tuner.alpha'"]),
    "key-without-section": (["train.rounds=2"], ["did you mean 'rounds'?"]),
    "key-of-a-comparison": (["seeds=1,2"], ["'compare.seeds'"]),
    "key-of-a-silo": (["silos.north.metrc=f1"], ["did you mean 'silos.north.metric'?"]),
    # words
    "no-equals": (["rounds"], ["'rounds'", "key=value"]),
    "no-key": (["=3"], ["'=3'", "key=value"]),
    # a backdoor
    "attack-no-target": (["attack=backdoor"], ["attack", "attack.target=LABEL"]),
    "attack-target-yes": (["attack=backdoor", "attack.target=yes"], ["attack.target", "quotes"]),
    "attack-trigger-empty": ([*ATTACK, "attack.trigger=' '"], ["attack.trigger", "none empty"]),
    "attack-trigger-none": ([*ATTACK, "attack.trigger=[]"], ["attack.trigger", "none empty"]),
    "attack-trigger-no": ([*ATTACK, "attack.trigger=no"], ["attack.trigger", "quotes"]),
    "attack-key": ([*ATTACK, "attack.triger=cf"], ["'attack.triger'", "did you mean 'attack.trigger'"]),
    "attack-rate-of-none": (["attack.rate=0.5"], ["attack", "rate belongs to attack=backdoor"]),
    # combinations
    "silos-and-path": (["data.path=."], ["'silos'", "'data.path'"]),
    "silos-and-set": (["data.set=demo"], ["'silos'", "'data.set'"]),
    "no-data": (["silos=[]"], ["silos", "data.path"]),
    "odd-task": (["silos=[]", "data.set=demo", "data.tasks=[../x]"], ["data.tasks", "'../x'", "letters"]),
    "nameless-task": (["silos=[]", "data.set=demo", "data.tasks=beta,,alpha"], ["data.tasks", "'' cannot be a name"]),
    "task-twice": (["silos=[]", "data.set=demo", "data.tasks=sentiment,sentiment"], ["data.tasks", "'sentiment'"]),
}


def refusal(source: str, *words: str) -> str:
    """The one line with which a configuration is refused."""
    with pytest.raises(InputError) as error:
        read_config(source, words)
    return str(error.value)


@pytest.mark.parametrize(("words", "names"), WORDS.values(), ids=WORDS)
@pytest.mark.usefixtures("place")
def test_a_bad_word_is_refused(words: list[str], names: list[str]) -> None:
    line = refusal("federation.yaml", *words)
    assert all(name in line for name in names), line


AT_RUN: dict[str, tuple[list[str], list[str]]] = {
    "lr": (["train.lr=-0.001"], ["train.lr", "greater than 0", "-0.001"]),
    "device-absent": (["device=cuda:99"], ["device=cuda:99", "this machine does not have it", "auto, cpu"]),
    "more-silos-than-there-are": (["sampling.count=3"], ["sampling.count", "3", "only 2"]),
    "silos-elsewhere": (["silos=[]", "federation.silos=[north]"], ["federation.silos", "own machines", "data.path"]),
    "tasks-elsewhere": (["silos=[]", "federation.silos=[north]", "data.tasks=x"], ["federation.silos", "own machines"]),
    "shared-head": (["head.scope=shared", "method=fedavg"], ["head.scope", "north", "south", "private"]),
    "attack-target": (
        ["attack=backdoor", "attack.target=god"],
        ["attack.target", "'god'", "did you mean 'good'", "same"],
    ),
    "attack-trigger-unknown": ([*ATTACK, "attack.trigger=♞"], ["attack.trigger", "'♞'", "vocabulary"]),
    "attack-long-trigger": ([*ATTACK, f"attack.trigger={'garden ' * 40}"], ["attack.trigger", "room for 32"]),
}


@pytest.mark.parametrize(("words", "names"), AT_RUN.values(), ids=AT_RUN)
def test_what_only_rows_or_the_machine_tell_is_refused_before_anything_is_written(
    refused: Refused, words: list[str], names: list[str]
) -> None:
    refused(*RUN, *words, names=names)


def test_an_attack_on_written_answers_is_refused(refused: Refused, place: Path) -> None:
    (place / "ask.csv").write_text("ask,answer\n" + "".join(f"say {n},well {n}\n" for n in range(20)))
    silos = "silos=[{name: east, path: ask.csv, text: ask, label: answer, kind: generation}]"
    line = refused(*RUN, silos, "head=lm", *ATTACK, names=[])
    assert line == "silotune: attack=backdoor: needs texts with labels, but silo 'east' writes answers"


@pytest.mark.usefixtures("place")
def test_the_sound_attack_is_not_refused(silotune: Silotune) -> None:
    outcome = silotune(*RUN, *ATTACK, "attack.fraction=1", "attack.trigger=[cf, old film]", "attack.position=random")
    assert outcome.code == 0, outcome.err


SILOS: dict[str, tuple[dict[str, object], list[str]]] = {
    "name-twice": ({"name": "south"}, ["silos", "'south'", "twice"]),
    "name-with-slash": ({"name": "nor/th"}, ["silos.0.name", "'nor/th'", "letters"]),
    "name-dots": ({"name": ".."}, ["silos.0.name", "'..'", "letters"]),
    "name-empty": ({"name": ""}, ["silos.0.name", "letters"]),
    "name-missing": ({"name": None}, ["silos.0.name", "string"]),
    "key": ({"lable": "opinion"}, ["'silos.north.lable'", "did you mean 'silos.north.label'", "north"]),
    "key-like-a-type": ({"str": 1}, ["'silos.north.str'"]),
    "path-empty": ({"path": ""}, ["silos.north.path", "north"]),
    "text-three": ({"text": ["a", "b", "c"]}, ["silos.north.text", "two", "north"]),
    "text-number": ({"text": 3}, ["silos.north.text", "column"]),
    "text-is-label": ({"text": "opinion"}, ["silos.north", "different columns"]),
    "labels-one": ({"labels": ["good"]}, ["silos.north.labels", "2"]),
    "labels-twice": ({"labels": ["good", "good"]}, ["silos.north.labels", "'good'"]),
    "labels-switch": ({"labels": [True, False]}, ["silos.north.labels", "quotes"]),
    "metric": ({"metric": "f2"}, ["silos.north.metric", "'f1'"]),
    "task-with-slash": ({"task": "a/b"}, ["silos.north.task", "'a/b'"]),
}


@pytest.mark.parametrize(("changes", "names"), SILOS.values(), ids=SILOS)
def test_a_bad_silo_is_refused(place: Path, changes: dict[str, object], names: list[str]) -> None:
    line = refusal(str(change_silo(place, **changes)))
    assert all(name in line for name in names), line


FILES: dict[str, tuple[bytes, list[str]]] = {
    "not-yaml": (b"rounds: 1\ntrain: {lr: 1\nseed: 2\n", ["bad.yaml", "line 3"]),
    "tab": (b"train:\n\tlr: 1\n", ["bad.yaml", "line 2"]),
    "list": (b"- rounds: 1\n", ["bad.yaml", "mapping", "list"]),
    "text": (b"rounds\n", ["bad.yaml", "mapping"]),
    "empty": (b"", ["silos", "data.path"]),
    "not-utf8": (b"description: caf\xe9\n", ["bad.yaml", "UTF-8", "16"]),
    "control-character": (b"description: a\x00b\n", ["bad.yaml", "YAML"]),
    "python-object": (b"rounds: !!python/object/apply:os.getcwd []\n", ["bad.yaml", "line 1"]),
    "key-twice": (b"rounds: 1\nseed: 1\nrounds: 2\n", ["bad.yaml", "line 3", "'rounds'", "twice"]),
    "inner-key-twice": (b"train:\n  lr: 1\n  lr: 2\n", ["bad.yaml", "line 3", "'lr'", "twice"]),
    "bad-date": (b"seed: 2001-99-99\n", ["bad.yaml", "YAML"]),
    "preset": (b"preset: demmo\n", ["'demmo'", "did you mean 'demo'", "mixed6"]),
    "value-and-group": (b"rounds: 2\nrounds.x: 3\n", ["rounds.x", "plain value"]),
    "silo-is-text": (b"silos: [north.csv]\n", ["silos.0", "name", "path"]),
    "silo-without-path": (b"silos: [{name: a}]\n", ["silos.a.path", "missing"]),
}


@pytest.mark.parametrize(("content", "names"), FILES.values(), ids=FILES)
def test_a_bad_file_is_refused(place: Path, content: bytes, names: list[str]) -> None:
    (place / "bad.yaml").write_bytes(content)
    line = refusal("bad.yaml")
    assert all(name in line for name in names), line


SOURCES = {
    "fedmcp-gleu": ["'fedmcp-gleu'", "did you mean 'fedmcp-glue'", "demo", "YAML file"],
    "none.yaml": ["none.yaml", "no such file"],
    "none.yml": ["none.yml", "no such file"],
    "folder.yaml": ["folder.yaml", "no such file"],
}


@pytest.mark.parametrize(("source", "names"), SOURCES.items())
def test_a_preset_or_file_that_does_not_exist_is_refused(place: Path, source: str, names: list[str]) -> None:
    (place / "folder.yaml").mkdir()
    line = refusal(source)
    assert all(name in line for name in names), line


@pytest.mark.usefixtures("place")
def test_the_sound_federation_is_not_refused() -> None:
    """The cases above change one thing each; without the change the configuration is good."""
    assert [silo.name for silo in read_config("federation.yaml").silos] == ["north", "south"]


def test_a_preset_may_prepare_an_attack_without_making_it() -> None:
    assert AttackConfig(target="good", trigger="cf", position="end").name == "none"
