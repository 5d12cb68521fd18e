"""What the records say equals what went over the wire between real SuperNodes and a SuperLink, message by message."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections import Counter

import pytest

from silotune.config import dump
from silotune.core.records import check_audit
from silotune.distributed.protocol.frames import MAGIC, decode
from tests.support.deployed import SILOS, plain

pytestmark = pytest.mark.long


class Relay:
    """Passes a silo's connections on to the SuperLink, and keeps every byte of both directions."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.streams: list[tuple[str, bytearray]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            for direction, source, target in (("up", near, far), ("down", far, near)):
                stream = bytearray()
                self.streams.append((direction, stream))
                threading.Thread(target=self._pass, args=(source, target, stream), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, stream: bytearray) -> None:
        try:
            while data := source.recv(2**16):
                stream += data
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def frames(self, direction: str) -> list[bytes]:
        """All frames of one direction, whoever of Flower's messages carried them."""
        return [frame for side, stream in self.streams if side == direction for frame in frames_in(bytes(stream))]

    def close(self) -> None:
        self._listener.close()


def frames_in(stream: bytes) -> list[bytes]:
    """Cut frames out of a stream by their own lengths."""
    frames, at = [], stream.find(MAGIC)
    while at >= 0:
        (length,) = struct.unpack(">I", stream[at + 4 : at + 8])
        header = json.loads(stream[at + 8 : at + 8 + length])
        end = at + 8 + length + sum(header["blobs"].values())
        assert end <= len(stream), "a frame that goes on in another connection"
        frames.append(stream[at:end])
        at = stream.find(MAGIC, end)
    return frames


def test_the_records_equal_the_wire(deployed, tiny_config, capsys):
    config = tiny_config("fedmcp", "rounds=2", "train.steps=2", f"federation.silos=[{','.join(SILOS)}]")
    files = plain(deployed, config)
    relays = {name: Relay(deployed.port) for name in SILOS}
    for name, file in files.items():
        text = file.read_text(encoding="utf-8")
        changed = text.replace(f"superlink: 127.0.0.1:{deployed.port}", f"superlink: 127.0.0.1:{relays[name].port}")
        assert changed != text
        file.write_text(changed, encoding="utf-8")
        deployed.begin(name, "federation", "join", file)
    settings, out = deployed.folder / "run.yaml", deployed.folder / "out"
    settings.write_text(dump(config), encoding="utf-8")
    started = deployed.command("federation", "start", deployed.link, settings, "--out", out)
    assert started.returncode == 0, started.stderr + started.stdout
    time.sleep(2)  # the last confirmations
    coordinators, problems = check_audit(out / "federation")
    assert problems == []
    for direction, entry_of, way in (("up", "came", "from"), ("down", "sent", "to")):
        wire = [frame for relay in relays.values() for frame in relay.frames(direction)]
        said = [entry["sha256"] for entry in coordinators if entry.get("direction") == entry_of]
        assert len(said) >= 3 * 4, f"greeting, two rounds and scores {way} each silo"
        assert Counter(said) == Counter(map(digest, wire))
    for name, relay in relays.items():
        entries, problems = check_audit(deployed.folder / name / "state")
        assert problems == []
        left = [frame for frame in relay.frames("up") if decode(frame).kind != "unavailable"]  # the node's own word
        assert Counter((entry["sha256"], entry["bytes"]) for entry in entries) == Counter(
            (digest(frame), len(frame)) for frame in left
        )
        assert [entry["kind"] for entry in entries].count("answer") == 2
        with capsys.disabled():
            print(f"\n{name}: {len(left)} messages left, {sum(map(len, left))} bytes, all of them in its record")
        relay.close()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
