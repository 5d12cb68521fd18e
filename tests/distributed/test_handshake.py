"""What differs between a silo and the coordinator is refused before round 1, by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from silotune.config import BackboneConfig, dump
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.job import AdmissionPolicy
from silotune.distributed.protocol.frames import PROTOCOL, Frame, HandshakeRefused, decode
from silotune.distributed.protocol.handshake import Hello, Identity, check_identity
from silotune.distributed.silo import session as session_module
from silotune.distributed.silo.session import Session
from silotune.errors import InputError, SilotuneError
from tests.support.session_rig import DirectLink, answering, federate, job, local_configs

OURS = Identity("1", "b" * 64, "t" * 64, "fp32", {"global/a": (2, 3)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "2"}, "another silotune: 2, the coordinator's: 1"),
        ({"backbone": "x" * 64}, "another backbone (sha256 of its weights): xxxxxxxxxxxx…"),
        ({"tokenizer": "x" * 64}, "another tokenizer (sha256): xxxxxxxxxxxx…"),
        ({"precision": "bf16"}, "another precision: bf16, the coordinator's: fp32"),
        ({"precision": "fp32, int8", "backbone": "x"}, "another precision: fp32, int8, the coordinator's: fp32"),
        ({"shapes": {"global/a": (3, 2)}}, "other part shapes: 'global/a' is (3, 2), the coordinator's: (2, 3)"),
        ({"shapes": {}}, "'global/a' is missing"),
        ({"shapes": {"global/a": (2, 3), "z": (1,)}}, "'z' is (1,), the coordinator's: missing"),
    ],
)
def test_each_difference_by_name(change, message):
    with pytest.raises(HandshakeRefused) as refused:
        check_identity("north", OURS, replace(OURS, **change))
    assert str(refused.value).startswith("silo 'north': ")
    assert message in str(refused.value)


TASK = {"name": "x", "labels": ["a", "b"], "metric": "accuracy", "kind": "classification"}
SAID = {"silo": "north", "identity": OURS.fields(), "task": TASK, "texts": 1}


def hello_of(silo, **more):
    return Frame("hello", SAID | {"silo": silo} | more)


def test_a_hello_is_read():
    hello = Hello.read(Frame("hello", SAID))
    assert (hello.silo, hello.identity, hello.task.labels, hello.texts) == ("north", OURS, ("a", "b"), 1)
    assert (hello.rank, Hello.read(Frame("hello", SAID | {"rank": 2})).rank) == (None, 2)


def admission_of(secure, shares=False):
    config = SimpleNamespace(aggregation=SimpleNamespace(secure=secure), privacy=SimpleNamespace(shares=shares))
    registry = SimpleNamespace(run="r", with_silo=lambda _: registry)
    return AdmissionPolicy(OURS, registry, [], config)


@pytest.mark.parametrize(
    ("shares", "said", "words"),
    [
        (False, {}, r"tells no masked\.peers; aggregation\.secure needs"),
        (True, {"masks": ["f" * 64, 3, 3]}, r"tells no noise and masked\.colluders; privacy\.shares needs"),
    ],
)
def test_a_silo_that_takes_no_part_in_sums_or_shares_is_refused_by_its_hello(shares, said, words):
    with pytest.raises(HandshakeRefused, match=f"^silo 'north': {words}"):
        admission_of(True, shares)(hello_of("north", **said))


def test_lists_of_peers_are_the_same_wherever_silos_tell_one():
    admission, pinned = admission_of(secure=False), ("f" * 64, 3, 3)
    admission(hello_of("east", masks=[*pinned]))
    admission(hello_of("north"))  # a list that nobody asked for, as in a run without masks, harms no other silo
    assert admission.pinned == pinned
    with pytest.raises(HandshakeRefused, match=r"silo 'south': its masked\.peers or masked\.least are others"):
        admission(hello_of("south", masks=["e" * 64, 3, 3]))


@pytest.mark.parametrize("field", ["identity", "task", "texts"])
def test_a_hello_without_a_field(field):
    with pytest.raises(HandshakeRefused, match=f"^silo 'north': a hello without '{field}'$"):
        Hello.read(Frame("hello", {name: value for name, value in SAID.items() if name != field}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("identity", value) for value in (None, 5, [], {}, {**OURS.fields(), "version": 1})),
        *(("task", value) for value in (None, "x", [], {}, {**TASK, "labels": 3}, {**TASK, "labels": [1, 2]})),
        *(("task", {**TASK, name: value}) for name in TASK for value in (None, [], {}, 1.5) if name != "labels"),
        *(("task", {**TASK, **more}) for more in ({"metric": "rouge1"}, {"metric": "unheard"}, {"x": 1})),
        *(("texts", value) for value in (None, "1", 0, 3, True, 1.0, [1], 10**400)),
        *(("rank", value) for value in (0, -1, "2", True, 2.0)),
        *(("masks", value) for value in ({}, {"peers": 1, "silos": 3, "least": 2}, "ab")),
    ],
)
def test_a_field_of_a_hello_that_is_something_else(field, value):
    with pytest.raises(HandshakeRefused) as refused:
        Hello.read(Frame("hello", SAID | {field: value}))
    message = str(refused.value)
    assert message.startswith(f"silo 'north': {field}: ")
    assert len(message) < 250
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["failed", "answer", ""])
def test_what_is_no_hello_names_the_silo(kind):
    for fields in ({}, {"reason": "its rows cannot be used"}, {"reason": "silo 'north': another version"}):
        with pytest.raises(HandshakeRefused) as refused:
            Hello.read(Frame(kind, {"silo": "north", **fields}))
        assert str(refused.value).count("north") == 1


def test_a_damaged_hello_ends_the_run_before_anything_began(tiny_config, tmp_path):
    config = tiny_config("fedmcp", "rounds=1")
    configs = local_configs(config, tmp_path / "run")
    answers = answering(configs)

    def damaged(data):
        frame = decode(answers[1](data))
        return Frame(frame.kind, frame.fields | {"texts": "one"}).encode()

    with pytest.raises(HandshakeRefused, match=r"^silo 'beta': texts"):
        coordinate(job(config, tmp_path / "run", configs), DirectLink(answers | {1: damaged}))
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.fixture
def started(tiny_config, tmp_path):
    """`started(change)` → the coordinator's refusal, with the second silo changed; nothing may have been trained."""

    def start(change, *words):
        config = tiny_config("fedmcp", "rounds=1", "train.steps=1", *words)
        out = tmp_path / "run"
        configs = local_configs(config, out)
        configs["beta"] = change(configs["beta"])
        link = DirectLink(answering(configs))
        with pytest.raises((InputError, SilotuneError)) as refused:
            coordinate(job(config, out, configs), link)
        assert {decode(data).kind for _, data in link.sent} == {"hello"}
        assert not list(out.rglob("*.safetensors"))
        assert json.loads((out / "federation" / "status.json").read_text())["error"] == str(refused.value)
        return str(refused.value)

    return start


def other_weights(folder):
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if name.endswith("word_embeddings.weight"))
    weights[name] = weights[name] + torch.zeros_like(weights[name]).index_fill(0, torch.tensor([0]), 1e-3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def other_tokenizer(folder):
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(("change", "named"), [(other_weights, "backbone"), (other_tokenizer, "tokenizer")])
def test_another_backbone_or_tokenizer(started, small_backbone, tmp_path, change, named):
    folder = tmp_path / "other"
    shutil.copytree(small_backbone, folder)
    change(folder)
    message = started(lambda local: local.model_copy(update={"backbone": BackboneConfig(name=str(folder))}))
    assert message.startswith(f"silo 'beta': another {named}")


def test_another_backbone_is_said_before_what_the_head_needs_of_it(started, backbone_folder, model_folder):
    """The silo's model has no head over the vocabulary; that it is another model says why."""
    words = f"backbone={model_folder('bert')}", "head=verbalizer", "head.words={bad: awful, good: [great, warm]}"
    other = BackboneConfig(name=str(backbone_folder("bert")))
    message = started(lambda local: local.model_copy(update={"backbone": other}), *words)
    assert message.startswith("silo 'beta': another backbone (sha256")


def test_another_configuration_than_the_one_agreed_on(started, tiny_config, tmp_path):
    agreed = tmp_path / "agreed.yaml"
    agreed.write_text(dump(tiny_config("fedmcp", "rounds=1", "train.steps=1", "train.lr=0.5")), encoding="utf-8")
    message = started(lambda local: local.model_copy(update={"config": str(agreed)}))
    assert message.startswith("silo 'beta': another configuration: train is")
    assert "agreed on was" in message


def test_another_version(tiny_config, tmp_path, monkeypatch):
    config = tiny_config("fedmcp", "rounds=1")
    monkeypatch.setattr(session_module, "__version__", "0.0.9")
    with pytest.raises(SilotuneError, match=r"silo '\w+': another silotune: 0.0.9, the coordinator's: "):
        federate(config, tmp_path / "run")


@pytest.mark.parametrize("number", [PROTOCOL + 1, PROTOCOL - 1, None, "1", True, -1, 10**300, [1]])
def test_a_silo_with_another_protocol_is_refused_before_its_identity_is_read(number):
    """Its other fields may be unknown here; equal versions do not help."""
    identity = {**OURS.fields(), "protocol": number, "a later field": 1}
    sent = number if type(number) is int and 0 <= number < 10**6 else "none"
    with pytest.raises(HandshakeRefused) as refused:
        Hello.read(Frame("hello", SAID | {"identity": identity}))
    assert str(refused.value).startswith(f"silo 'north': identity: protocol {sent}, the coordinator's: {PROTOCOL}; ")


@pytest.mark.parametrize("number", [PROTOCOL + 1, None])
def test_a_silo_refuses_a_coordinator_with_another_protocol(tiny_config, tmp_path, number):
    """Every request says the number, and is refused before the rest of its identity is read."""
    config = tiny_config("fedmcp", "rounds=1")
    session = Session(local_configs(config, tmp_path / "run")["beta"])
    identity = {**OURS.fields(), "protocol": number, "a later field": 1}
    if number is None:
        del identity["protocol"]
    for kind in ("hello", "round", "score"):
        fields = {"run": "0" * 16, "config": "", "identity": identity}
        reply = decode(session.answer(Frame(kind, fields).encode()))
        assert (reply.kind, reply.fields["silo"]) == ("refused", "beta")
        message = f"silo 'beta': identity: protocol {PROTOCOL}, the coordinator's: {number or 'none'}; install the same"
        assert reply.fields["reason"].startswith(message)


def test_a_stranger_is_not_let_in(tiny_config, tmp_path):
    """A node with a name that is not among the silos, and one whose key is registered under another name."""
    config = tiny_config("fedmcp", "rounds=1", "train.steps=1", "federation.join=0.2")
    configs = local_configs(config, tmp_path / "run")
    answers = answering(configs)
    stranger = Session(configs["beta"].model_copy(update={"name": "delta"})).answer
    joined = {0: answers[0], 1: stranger, 2: answers[2], 3: answers[1]}
    link = DirectLink(joined, names={0: "silo-alpha", 2: "gamma", 3: "silo-alpha"})
    with pytest.raises(SilotuneError, match=r"did not join within federation.join=0.2 s: beta; nothing began"):
        coordinate(job(config, tmp_path / "run", configs), link)
