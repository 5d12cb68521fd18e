"""Every message is read once: a request where it is answered, an update where it arrives."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256

import pytest

from silotune.communication import messages
from silotune.communication.uplink.pipeline import UplinkPipeline
from silotune.distributed.protocol.frames import Frame, ProtocolError, decode, peek_kind
from silotune.training.coordinator import Coordinator
from tests.support.session_rig import federate


@pytest.fixture
def tensor_reads(monkeypatch):
    """How often the tensors of each message were read, by the message's sha256."""
    reads = Counter()
    read_tensors, read_block = messages.read_tensors, messages.read_block

    def counted(content):
        reads[sha256(content).hexdigest()] += 1
        return read_tensors(content)

    def counted_block(content):
        reads[sha256(content).hexdigest()] += 1
        return read_block(content)

    monkeypatch.setattr(messages, "read_tensors", counted)
    monkeypatch.setattr(messages, "read_block", counted_block)
    return reads


@pytest.mark.parametrize("words", [["uplink=int8"], ["aggregation.max_norm=9"]], ids=["dequantized", "parts"])
def test_an_update_is_read_checked_and_dequantized_once(tiny_config, tmp_path, monkeypatch, tensor_reads, words):
    """And so are a request's tensors, also where the same request asks for a score and for a round."""
    calls = Counter()
    for owner, name in ((Coordinator, "receive"), (Coordinator, "_check_norm"), (UplinkPipeline, "read")):
        original = getattr(owner, name)

        def counted(self, *args, original=original, name=name):
            calls[name] += 1
            return original(self, *args)

        monkeypatch.setattr(owner, name, counted)
    checks = Counter()
    check_tensors = messages.check_tensors
    monkeypatch.setattr(messages, "check_tensors", lambda *a: checks.update(["checked"]) or check_tensors(*a))
    _, link = federate(tiny_config("fedmcp", "rounds=3", "train.steps=1", *words), tmp_path / "run")
    requests = [decode(data) for _, data in link.sent if peek_kind(data) in ("round", "score", "final")]
    replies = [decode(data) for _, data in link.came if peek_kind(data) == "answer"]
    assert any(request.fields.get("judge") for request in requests)
    updates = [reply.blobs["message"] for reply in replies]
    assert len(updates) == 9
    assert all(tensor_reads[sha256(update).hexdigest()] == 1 for update in updates)
    assert calls["receive"] == calls["_check_norm"] == 9
    assert calls["read"] == (9 if words == ["uplink=int8"] else 0)
    broadcasts = Counter(sha256(request.blobs["broadcast"]).hexdigest() for request in requests)
    assert {name: tensor_reads[name] for name in broadcasts} == broadcasts
    assert checks["checked"] == len(updates) + len(requests) == tensor_reads.total()


class HeaderOnly(bytes):
    """A frame whose last 40 bytes, its blob, may not be read."""

    def __getitem__(self, key):
        if isinstance(key, slice) and (key.stop is None or key.stop > len(self) - 40):
            raise AssertionError("a blob was read")
        return super().__getitem__(key)


def test_the_kind_is_read_without_the_blobs():
    frame = Frame("round", {"n": 1}, {"broadcast": b"x" * 40}).encode()
    assert peek_kind(frame) == "round"
    assert peek_kind(HeaderOnly(frame)) == "round"


@pytest.mark.parametrize("data", [b"", b"SLT1", b"nothing of the kind"])
def test_the_kind_of_other_bytes(data):
    with pytest.raises(ProtocolError):
        peek_kind(data)
