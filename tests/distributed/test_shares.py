"""The numbers that leave a silo are those its operator shares, and a coordinator takes no others."""

from __future__ import annotations

import errno
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.numpy import load as load_numpy

from silotune.config import dump
from silotune.config.coordinator import FederationConfig
from silotune.data.loading import load_silos
from silotune.data.row_folder import write_rows
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.job import CoordinatorJob, prepare
from silotune.distributed.protocol.disclosure import validate_metrics, validate_scores
from silotune.distributed.protocol.frames import Frame, decode
from silotune.distributed.protocol.handshake import parse_wire_config, wire_config
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.silo_config import REHEARSAL, SiloSettings
from silotune.errors import SilotuneError
from silotune.methods.step import EVENT_KEYS, Step
from silotune.runs.storage.readers import read_summary
from tests.support.malicious import ALLOWED
from tests.support.method_cases import logged
from tests.support.session_rig import ALL, DirectLink, answering, federate, job, local_configs

SHORT = ("rounds=3", "train.steps=2")


def said_in(message):
    """The fields of an update."""
    header = json.loads(message[8 : 8 + int.from_bytes(message[:8], "little")])
    return json.loads(header["__metadata__"]["silotune"])


def test_a_silo_shares_only_what_it_agreed_to(whole, tmp_path):
    config, expected = whole("fedmcp")
    summary, link = federate(config, tmp_path / "run", share=["validation"])
    assert summary["shared_sha256"] == expected["shared_sha256"]  # uniform: row counts play no part
    for silo in summary["silos"].values():
        assert silo["validation"] is not None
        assert (silo["test"], silo["rows"]) == (None, None)
    assert summary["average"] is None
    for _, data in link.came:
        frame = decode(data)
        assert frame.fields.get("metrics", {}) == {}
        assert "rows" not in frame.fields
        if frame.kind == "hello":
            assert frame.fields.keys() == {"silo", "identity", "task", "texts"}
        if frame.kind == "answer":
            assert said_in(frame.blobs["message"])["rows"] == 1


def update_bytes(tensors, said):
    """The bytes of an update: length and JSON of its header, padded to 8 bytes, and each tensor's float32 in order."""
    header, start = {"__metadata__": {"silotune": json.dumps(said, sort_keys=True)}}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [start, start + 4 * array.size]}
        start += 4 * array.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values())


@pytest.mark.parametrize("share", [[], ["rows"]])
def test_every_byte_that_leaves_is_one_of_these(tiny_config, in_one_process, tmp_path, share):
    """Each frame is written down anew from what may leave, and equals what left, byte for byte."""
    config, alone = tiny_config("fedmcp", *SHORT), in_one_process("fedmcp", *SHORT)
    silos = {silo.name: silo for silo in load_silos(config)}
    shapes = alone.federation.coordinator.expected.shapes
    worked = {(event["round"], event["silo"]): event for event in logged(alone.folder, "silo")}
    _, link = federate(config, tmp_path / "run", share=share)
    kinds = []
    for (_, asked), (node, data) in zip(link.sent, link.came, strict=True):
        request, name = decode(asked), [*silos][node]
        splits, number = silos[name].splits, request.fields.get("round")
        fields, blobs = {"silo": name}, {}
        if request.kind == "hello":
            kind, identity = "hello", request.fields["identity"] | {"shapes": shapes}
            fields |= {"identity": identity, "task": silos[name].task.fields(), "texts": len(splits.train[0].texts)}
        elif request.kind == "round":
            kind, work = "answer", worked[number, name]
            counts = {"steps": work["steps"], "rows": work["rows"]} if share else {}
            fields |= {"round": number, "state": f"{number:04d}", "metrics": counts, "note": ""}
            fields |= {"scores": {}} if request.fields["judge"] else {}
            tensors = dict(sorted(load_numpy(decode(data).blobs["message"]).items()))
            assert {part: array.shape for part, array in tensors.items()} == shapes
            said = {"round": number, "silo": name, "rows": len(splits.train) if share else 1}
            blobs = {"message": update_bytes(tensors, said)}
        else:
            kind = "scores"
            last = "test" in request.fields["splits"]
            fields |= {"scores": {"rows": splits.counts()} if share and last else {}}
        kinds.append(kind)
        assert data == Frame(kind, fields, blobs).encode()
    assert {*kinds} == {"hello", "answer", "scores"}


@pytest.mark.parametrize(("share", "told"), [([], ""), (["reasons"], ": they do not suit the run's head or limits")])
def test_an_error_about_rows_leaves_without_their_numbers(attack, share, told, capsys):
    coordinator = attack(("fedmcp", "tuner.r=1", "rounds=1"), share=share)
    coordinator.configure(train__tokens_at_once=3)
    reply = coordinator.ask("hello")
    assert reply == Frame(
        "failed", {"silo": "alpha", "reason": f"silo 'alpha': its rows cannot be used{told} (see the worker's log)"}
    )
    assert "tokens" in capsys.readouterr().err


def test_silos_are_named_with_commas_as_other_names_are():
    assert FederationConfig(silos="north, south").silos == ["north", "south"]
    with pytest.raises(ValueError, match="'north' appears twice"):
        FederationConfig(silos="north,north")


def test_each_machine_has_its_own_device_and_number_of_threads(tiny_config):
    config = tiny_config("fedmcp", "device=cpu", "threads=3")
    text = wire_config(config, ["alpha"])
    assert text == wire_config(tiny_config("fedmcp"), ["alpha"])
    assert parse_wire_config(text).threads is None
    assert "device: cpu\n" in dump(config)


def test_silos_of_a_deployed_federation_have_no_test_set_in_common(tiny_config, tmp_path):
    """A preset may divide one set: on machines of their own silos have divided it already."""
    named = FederationConfig(silos=["north", "south"])
    config = tiny_config("fedavg", "data.tasks=[alpha]", "partition=iid", "partition.silos=2", "rounds=1")
    task = CoordinatorJob.read(prepare(config.model_copy(update={"federation": named}), tmp_path / "run", resume=False))
    halves = dict(zip(named.silos, load_silos(config), strict=True))
    configs = {}
    for name, data in halves.items():
        write_rows(tmp_path / name, replace(data, name=name))
        fields = {"folder": str(tmp_path / f"{name}-state"), "rows": str(tmp_path / name), "share": ALL}
        fields |= {"policy": dict(REHEARSAL), "approval": "policy"}
        configs[name] = SiloSettings(name=name, backbone=config.backbone, **fields)
    coordinate(task, DirectLink(answering(configs)))
    summary = read_summary(tmp_path / "run")
    assert summary["global"] is None
    assert summary["silos"].keys() == {"north", "south"}


def test_parts_that_an_operator_does_not_let_go_stay(tiny_config, tmp_path):
    """Whatever the coordinator configures: the silo refuses before anything is trained."""
    for method, words, send, refused in (
        (
            "fedavg",
            ("head=linear", "head.scope=shared", "data.tasks=[alpha]", "method.adapters=1"),
            ["global"],
            "shares head",
        ),
        ("fedmcp", (), [], "shares global; its silo config lets only nothing leave"),
        ("fedmcp", (), ["global", "head"], None),
    ):
        config = tiny_config(method, "rounds=1", "train.steps=1", *words)
        out = tmp_path / f"{method}-{refused is None}-{len(send)}"
        configs = local_configs(config, out, send=send)
        link = DirectLink(answering(configs))
        if refused is None:
            coordinate(job(config, out, configs), link)
        else:
            with pytest.raises(SilotuneError, match=refused):
                coordinate(job(config, out, configs), link)
            assert not any(decode(data).kind == "answer" for _, data in link.came)


def test_what_is_no_longer_shared_does_not_leave_with_an_answer_that_was_kept(tiny_config, tmp_path):
    """Round 2's answer was given and went under; by the time it is asked for again, fewer numbers may leave."""
    config = tiny_config("fedmcp", "rounds=2", "train.steps=2", "uplink=clip,laplace,int8")
    configs = local_configs(config, tmp_path / "run")
    _, link = federate(config, tmp_path / "run")
    (request,) = [
        data for node, data in link.sent if (f := decode(data)).kind == "round" and (node, f.fields["round"]) == (1, 2)
    ]
    full = decode(Session(configs["beta"]).answer(request))
    assert full.encode() in [data for _, data in link.came]
    assert full.fields["metrics"].keys() >= {"loss", "rows", "steps", "seconds"}
    assert full.fields["scores"]["validation"] is not None
    quiet = decode(Session(configs["beta"].model_copy(update={"share": ["seconds"]})).answer(request))
    assert (quiet.fields["metrics"].keys(), quiet.fields["scores"]) == ({"seconds"}, {})
    sent, kept = (load_numpy(frame.blobs["message"]) for frame in (quiet, full))
    assert sent.keys() == kept.keys()  # noised once, with the noise of then
    assert all(sent[name].tobytes() == kept[name].tobytes() for name in kept)
    fields, before = (said_in(frame.blobs["message"]) for frame in (quiet, full))
    assert before["rows"] > 1
    assert fields == before | {"rows": 1}
    assert decode(Session(configs["beta"]).answer(request)) == full


def test_scores_that_are_none_are_refused_by_the_silos_name_and_the_run_ends(tiny_config, tmp_path):
    """`test_what_is_no_score_is_not` has all that is none."""
    config = tiny_config("fedmcp", "rounds=1", "train.steps=1")
    configs = local_configs(config, tmp_path / "run")
    answers, scores = answering(configs), {"validation": 50, "test": 50, "asr": 1}

    def lying(data):
        frame = decode(answers[1](data))
        return Frame("scores", frame.fields | {"scores": scores}).encode() if frame.kind == "scores" else frame.encode()

    coordinate(job(config, tmp_path / "run", configs), DirectLink(answers | {1: lying}))
    silos = read_summary(tmp_path / "run")["silos"]
    nothing = {"metric": "accuracy", "validation": None, "test": None, "rows": None}
    assert silos["beta"].items() >= nothing.items()
    assert silos["beta"].keys() == silos["alpha"].keys()
    (refused, *_) = logged(tmp_path / "run", "silo-failed")
    assert (refused["silo"], refused["reason"]) == ("beta", "answered with something else than scores")


def test_row_counts_cannot_be_withheld_where_they_weigh(tiny_config, tmp_path):
    config = tiny_config("fedmcp", "aggregation=samples", "rounds=1")
    with pytest.raises(SilotuneError, match=r"'(alpha|beta|gamma)'.*aggregation=samples.*allowed: uniform"):
        federate(config, tmp_path / "run", share=["validation"])


GOOD = {"loss": 0.5, "rows": 40, "steps": 4, "seconds": 1.5, "similarity_private": -0.25}


def test_a_trainings_numbers_are_taken():
    assert validate_metrics(GOOD)
    assert validate_metrics({})


@pytest.mark.parametrize(
    "bad",
    [
        *({"rows": value} for value in (math.nan, math.inf, -1, True, "3", None, 10**400)),
        *({name: 1.0} for name in ("event", "round", "silo", "note", "bytes_up", "bytes_down")),
        *({name: 1.0} for name in ("", "Loss", "a b", "x" * 41, "ünder", "a\nb")),
        {"loss": math.nan},
        {f"n{number}": 1.0 for number in range(101)},
        [("loss", 1.0)],
        None,
    ],
)
def test_anything_else_is_not(bad):
    assert not validate_metrics(GOOD | bad if isinstance(bad, dict) else bad)


ROWS = {"train": 40, "validation": 5, "test": 0}
SCORES = {"validation": 71.5, "test": 100, "rows": ROWS}


@pytest.mark.parametrize("entry", [SCORES, {}, {"validation": None}, {"test": 0.0, "rows": None}])
def test_scores_are_taken(entry):
    assert validate_scores(entry)


@pytest.mark.parametrize(
    "bad",
    [
        *({name: value} for name in ("validation", "test") for value in (-0.1, 100.5, math.nan, True, "50", [50])),
        *({name: 50} for name in ("asr", "accuracy", "metric", "sampled", "silo", "")),
        {"metric": "accuracy"},
        *({"rows": value} for value in (40, [40], {}, {"train": 40}, ROWS | {"more": 1})),
        *({"rows": ROWS | {"train": value}} for value in (-1, 1.0, True, None, "40", 10**400)),
        ["validation"],
        None,
    ],
)
def test_what_is_no_score_is_not(bad):
    assert not validate_scores(SCORES | bad if isinstance(bad, dict) else bad)


@pytest.mark.parametrize("name", sorted(EVENT_KEYS))
def test_a_methods_term_may_not_wear_the_logs_names(name):
    step = Step(None, {}, {}, {}, {}, {})
    with pytest.raises(ValueError, match=name):
        step.log(**{name: torch.tensor(1.0)})
    step.log(full=torch.tensor(2.0))
    assert step.terms["full"] == 2.0


@pytest.mark.parametrize(
    ("share", "full", "missing"),
    [([], "OSError: no space is left on the disk", "its rows cannot be used: a file is missing"),
     (["reasons"], "OSError: no space is left on the disk", "its rows cannot be used: a file is missing")],
)  # fmt: skip
def test_why_something_failed_leaves_as_one_of_a_few_phrases_if_at_all(attack, monkeypatch, share, full, missing):
    coordinator = attack(ALLOWED, share=share)

    def write(*_, **__):
        raise OSError(errno.ENOSPC, "a row's text")

    monkeypatch.setattr(coordinator.session.store, "count", write)
    assert coordinator.reason("round") == f"{full} (see the worker's log)"
    shutil.rmtree(coordinator.settings.rows)
    coordinator.restart()
    assert coordinator.reason("round") == f"silo 'alpha': {missing} (see the worker's log)"
