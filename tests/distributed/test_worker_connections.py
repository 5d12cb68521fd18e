"""A worker's connections and the size of its waiting requests are bounded, and pings are answered."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from silotune.distributed.protocol.frames import Frame, ProtocolError, ask_worker, send
from silotune.distributed.silo import worker
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.worker import MOST_CONNECTIONS, hung_up


@pytest.fixture
def listening(short):
    """A worker that works forever, its socket, and how many connections it has."""
    settings = SiloSettings(
        name="a", folder=str(short), rows="rows", share=[], policy={"preset": "trusting", "frame_mib": 1}
    )
    waiting = worker._Worker(settings, busy="working")
    path = short / "worker.sock"
    listener = worker._listen(path)
    threading.Thread(target=worker._accept, args=(listener, waiting), daemon=True).start()
    yield waiting, path, lambda: MOST_CONNECTIONS - waiting.connections._value
    listener.close()


def connect(path):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    while True:
        try:
            connection.connect(str(path))
            return connection
        except BlockingIOError:  # as many wait to be accepted as the kernel keeps
            time.sleep(0.01)


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_full_backlog_is_waited_for_and_no_worker_is_taken_for_a_dead_one(short):
    path = short / "worker.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(str(path))
            began = time.monotonic()
            with pytest.raises(ProtocolError, match="Resource temporarily unavailable"):
                ask_worker(path, Frame("ping").encode(), 0.2)
            assert time.monotonic() - began >= 0.2
            answered = []
            asking = threading.Thread(target=lambda: answered.append(worker.ping(path, 20)))
            asking.start()
            time.sleep(0.1)
            listener.accept()[0].close()
            accepted, _ = listener.accept()
            accepted.settimeout(20)
            send(accepted, Frame("pong", {"busy": "working"}).encode())
            asking.join()
            accepted.close()
    assert answered == [{"busy": "working"}]


def test_where_all_wait_for_replies_a_new_one_is_closed(listening):
    waiting, path, opened = listening
    asking = [connect(path) for _ in range(MOST_CONNECTIONS)]
    for connection in asking:
        send(connection, Frame("round").encode())
    until(lambda: waiting.requests.qsize() == MOST_CONNECTIONS)
    with pytest.raises(ProtocolError):
        ask_worker(path, Frame("ping").encode(), 10)
    asking.pop().close()  # its peer is gone: its request is not worked on, and there is room
    until(lambda: opened() == MOST_CONNECTIONS - 1)
    assert worker.ping(path)["busy"] == "working"
    given_up = [waiting.requests.get().given_up.is_set() for _ in range(MOST_CONNECTIONS)]
    assert given_up.count(True) == 1
    for connection in asking:
        connection.close()


def test_requests_together_have_a_size(listening, capfd):
    waiting, path, _ = listening
    frame = Frame("round", {}, {"broadcast": bytes(2**20 - 100)}).encode()
    asking = [connect(path) for _ in range(3)]
    for connection in asking[:2]:
        send(connection, frame)
    until(lambda: waiting.requests.qsize() == 2)
    asking[2].sendall(struct.pack(">Q", len(frame)))
    assert asking[2].recv(1) == b""
    assert "beside others that wait is too much" in capfd.readouterr().err
    for connection in asking:
        connection.close()


def test_a_worker_ends_also_where_an_import_drops_what_is_raised_in_it(short):
    script = f"""
import os, signal, sys, time, types
from silotune.distributed.silo import worker
from silotune.distributed.silo.silo_config import SiloSettings

class Loading(types.ModuleType):
    def __getattr__(self, name):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        except KeyboardInterrupt:
            pass
        sys.exit("went on")

sys.modules["silotune.distributed.silo.session"] = Loading("session")
worker.serve(SiloSettings(name="a", folder="{short}", rows="rows", share=[], policy="trusting"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "worker 'a': stopped" in done.stderr) == (0, True), done.stderr
    assert not (short / "worker.sock").exists()


def test_a_peer_that_waits_has_not_hung_up_whatever_the_timeout():
    """A request that trains for longer than the time in which it had to arrive is answered all the same."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.05)
        started = time.monotonic()
        assert not hung_up(ours)
        assert not hung_up(ours)
        assert time.monotonic() - started < 0.04
        theirs.sendall(b"x")
        assert not hung_up(ours)
        ours.setblocking(True)
        assert ours.recv(1) == b"x"
        theirs.close()
        assert hung_up(ours)
