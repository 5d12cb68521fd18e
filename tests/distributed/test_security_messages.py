"""Every byte that a silo's side hands to Flower in a run over real text: no text, no private tensor, no more than said.

Bytes are taken where the ClientApp gives its answer to Flower, before TLS: what an eavesdropper with the keys, or the
coordinator, reads. Sessions answer in this process, in the workers' place.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Message, MessageType
from flwr.common.serde import recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity
from safetensors.numpy import load as load_numpy

from silotune.data.loading import load_silos
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.flower import client_app
from silotune.distributed.flower.link import unwrap, wrap
from silotune.distributed.protocol.frames import Frame, decode
from silotune.distributed.silo.session import Session
from silotune.runs.build.resolve import read_config
from silotune.runs.run_result import load_run
from tests.support.session_rig import DirectLink, job, local_configs
from tests.support.tiny import save_backbone

TASKS = ["sentiment", "paraphrase", "inference"]
WINDOW = 12
"""Bytes of a row's text in a row that must appear nowhere."""
PRINTABLE = re.compile(rb"[\x20-\x7e]{%d,}" % WINDOW)


@dataclass
class Recorded:
    """One message: what the ClientApp gave to Flower, as Flower writes it, and the frame within."""

    silo: str
    wire: bytes
    frame: Frame


def run_recorded(config, out, monkeypatch):
    """A whole run through the real ClientApp; the messages of all silos."""
    configs = local_configs(config, out.parent / "silos")
    sessions = {name: Session(local) for name, local in configs.items()}
    monkeypatch.setattr(client_app, "ask_worker", lambda path, data, patience: sessions[path].answer(data))
    for name in ("_run_id", "_node_id", "_task_id"):  # Flower sets them in each of its processes
        monkeypatch.setattr(TaskIdentity, name, 1)
    recorded: list[Recorded] = []

    def through_flower(silo):
        def answer(data: bytes) -> bytes:
            request = Message(wrap(data), dst_node_id=1, message_type=MessageType.QUERY)
            context = SimpleNamespace(node_config={"worker": silo, "silo": silo})
            reply = client_app.query(request, context)
            data = unwrap(reply)
            recorded.append(Recorded(silo, recorddict_to_proto(reply.content).SerializeToString(), decode(data)))
            return data

        return answer

    link = DirectLink({node: through_flower(name) for node, name in enumerate(configs)})
    coordinate(job(config, out, configs, local=False), link)
    return recorded


def texts_of(config) -> list[bytes]:
    rows = [row for silo in load_silos(config) for split in ("train", "validation", "test")
            for row in getattr(silo.splits, split)]  # fmt: skip
    return sorted({text.encode() for row in rows for text in row.texts})


def windows(data: bytes) -> set[bytes]:
    return {data[start : start + WINDOW] for start in range(len(data) - WINDOW + 1)}


def strings(value) -> set[str]:
    """All strings in plain values."""
    if isinstance(value, dict):
        return set(value) | set().union(set(), *map(strings, value.values()))
    if isinstance(value, list):
        return set().union(set(), *map(strings, value))
    return {value} if isinstance(value, str) else set()


def assert_nothing_private(config, out, recorded) -> None:
    everything = b"".join(record.wire for record in recorded)
    # texts: no twelve bytes in a row of any of them, whole or lower-cased as the tokenizer reads them
    texts = texts_of(config)
    assert len(texts) > 100
    assert all(PRINTABLE.search(text) for text in texts)  # so the scan, which looks at ASCII, can find each of them
    private = set().union(*(windows(text) | windows(text.lower()) for text in texts))
    sent = {part for run in PRINTABLE.findall(everything) for part in windows(run)}
    assert sent, "the scan sees what is there"
    assert not sent & private, "found & private"
    # labels: nowhere but in the description of the task that a hello holds
    silos = load_silos(config)
    names = {name for silo in silos for name in silo.task.labels} - {silo.name for silo in silos}
    assert len(names) > 5
    kinds = set()
    for record in recorded:
        kinds.add(record.frame.kind)
        fields = {key: value for key, value in record.frame.fields.items() if key != "task"}
        assert not strings(fields) & names
        for blob in record.frame.blobs.values():
            header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
            assert not strings(header) & names
            assert {name.split("/")[0] for name in header if name != "__metadata__"} == {"global"}
    assert kinds == {"hello", "answer", "scores"}
    # token ids of rows, as integers of any width
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.backbone.name)
    for text in texts[:100]:
        ids = tokenizer(text.decode())["input_ids"][:6]
        assert not [kind for kind in ("<i2", "<i4", "<i8") if np.array(ids, kind).tobytes() in everything]
    # private tensors: pieces of sixteen numbers, also in half precision
    kept = [array for path in (out.parent / "silos").rglob("*.safetensors") if path.name != "shared.safetensors"
            for name, array in load_numpy(path.read_bytes()).items() if array.dtype == np.float32]  # fmt: skip
    assert len(kept) > 20
    draws = np.random.default_rng(1)
    looked = 0
    for array in kept:
        flat = np.ascontiguousarray(array).ravel()
        if flat.size < 16 or not np.any(flat):
            continue
        start = int(draws.integers(flat.size - 15))
        piece = flat[start : start + 16]
        if np.count_nonzero(piece) == 16:
            looked += 1
            assert piece.tobytes() not in everything
            assert piece.astype(np.float16).tobytes() not in everything
    assert looked > 20


def assert_sizes(recorded, least: int) -> None:
    """Messages of a MiB or more: Flower's bytes against the shared tensors' own."""
    ratios = []
    for record in recorded:
        if record.frame.kind == "answer":
            tensors = load_numpy(record.frame.blobs["message"])
            size = sum(array.nbytes for array in tensors.values())
            assert size >= 2**20
            ratios.append(len(record.wire) / size)
    assert len(ratios) >= least
    assert max(ratios) <= 1.05
    assert min(ratios) >= 1.0


def demo(backbone, *words):
    return read_config("demo", [f"backbone={backbone}", f"data.tasks=[{','.join(TASKS)}]", "data.rows_per_silo=60",
                                "rounds=2", "train.steps=1", "threads=1", "precision=fp32", *words])  # fmt: skip


def test_what_a_silo_hands_to_flower(tmp_path, monkeypatch):
    """With wide adapters, so that messages have their megabyte. A row in the note of an answer is seen."""
    config = demo(save_backbone("bert", tmp_path / "backbone"), "tuner.r=1200")
    recorded = run_recorded(config, tmp_path / "run", monkeypatch)
    assert_nothing_private(config, tmp_path / "run", recorded)
    assert_sizes(recorded, 6)
    text = texts_of(config)[50].decode()
    leaking = Frame("answer", {"note": text[3:20]}).encode()
    recorded.append(Recorded("x", recorddict_to_proto(wrap(leaking)).SerializeToString(), decode(leaking)))
    with pytest.raises(AssertionError, match="found & private"):
        assert_nothing_private(config, tmp_path / "run", recorded)


def test_a_coordinators_folder_is_one_where_all_parts_are_shared(tmp_path, monkeypatch, tiny_config):
    config = tiny_config(
        "fedavg", "rounds=1", "train.steps=1", "head=linear", "head.scope=shared",
        "data.tasks=[alpha]", "partition=iid", "partition.silos=3",
    )  # fmt: skip
    run_recorded(config, tmp_path / "run", monkeypatch)
    (answer,) = load_run(tmp_path / "run").model("silo-1").predict(["the garden was bright"])
    assert answer.label in ("bad", "good")
