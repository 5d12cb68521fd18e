"""A silo's process (`silotune worker`), which holds backbone and rows, behind a Unix socket.

Flower starts a process for every message, which only forwards the request (`client_app.py`). Connections are read in
threads; torch runs in the main thread alone, one request after another, so that its number of threads holds for all.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from silotune.core.clock import log_line
from silotune.core.files import free_bytes
from silotune.core.surroundings import require_posix
from silotune.distributed.metrics import link_measures, measure, serve_metrics
from silotune.distributed.protocol.frames import Frame, ProtocolError, ask_worker, decode, peek_kind, receive, send
from silotune.distributed.silo.silo_config import SiloSettings, read_silo_settings
from silotune.errors import InputError, file_errors

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from silotune.distributed.silo.session import Session


@dataclass(frozen=True)
class _WaitingRequest:
    """A request that waits for the main thread, and the queue for its reply."""

    kind: str
    data: bytes
    reply: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set when its peer has hung up."""


MOST_CONNECTIONS = 16
"""Connections at once. Flower's node has one for every message that is under way, and tools ping."""

_REQUESTS_AT_ONCE = 2
"""Requests of the largest size that may be read or wait together."""

_SLOW_PEER = 60.0
"""Seconds for a request to arrive, and for a reply to be taken."""

_LOOK = 1.0
"""Seconds between looks whether the peer of a request that waits is still there."""


KINDS = ("hello", "round", "final", "score", "survey")
"""Kinds of requests; any other is counted as `other`, because the coordinator chooses the word."""

OUTCOMES = ("answered", "waiting", "refused", "refused by policy", "failed")


class WorkerMetrics:
    """Counts a worker's requests."""

    def __init__(self, settings: SiloSettings) -> None:
        from silotune.distributed.silo.store import SiloStore  # it imports torch, which pings do without

        self._settings = settings
        self._store = SiloStore(Path(settings.folder), budget=settings.privacy)
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._seconds = 0.0

    def count(self, kind: str, reply: bytes, seconds: float) -> None:
        """Count a request that was worked on."""
        with self._lock:
            self._requests[kind if kind in KINDS else "other", _outcome(decode(reply))] += 1
            self._seconds += seconds

    def measures(self) -> Iterator[Metric]:
        """Yield the present values; nothing in them is about the rows."""
        with self._lock:
            requests, seconds = Counter(self._requests), self._seconds
        values = [((kind, outcome), requests[kind, outcome]) for kind in (*KINDS, "other") for outcome in OUTCOMES]
        yield measure("worker_requests", "Requests by kind and outcome.", values, ("kind", "outcome"), "counter")
        yield measure("worker_busy_seconds", "Time spent on requests.", seconds, kind="counter")
        free = free_bytes(Path(self._settings.folder))
        yield measure("worker_disk_free_bytes", "Free space for its states.", free)
        run, numbers = self._store.last_run()
        yield measure("worker_run_numbers", "Numbers that left in the last run.", numbers if run else None)
        budget, spent, rows = self._settings.budget, self._store.spent("").epsilon, self._settings.privacy
        if rows is not None:
            budget, spent = rows.epsilon, self._store.ledger.spent(rows.unit) or 0.0
        description = (
            "Epsilon of noise on rows, by the ledger; without its budget that of noised replies, plainly added."
        )
        yield measure("worker_epsilon_sum", description, spent)
        yield measure("worker_epsilon_budget", "Epsilon of all runs together.", budget)
        yield from link_measures(Path(self._settings.folder))  # where `federation join` runs worker and node


def _outcome(reply: Frame) -> str:
    from silotune.distributed.silo.policy import POLICY_REFUSES

    if reply.kind == "refused" and POLICY_REFUSES in str(reply.fields.get("reason", "")):
        return "refused by policy"
    return reply.kind if reply.kind in ("waiting", "refused", "failed") else "answered"


@dataclass
class _Worker:
    """State that the threads of connections share with the main thread."""

    settings: SiloSettings
    requests: queue.SimpleQueue[_WaitingRequest] = field(default_factory=queue.SimpleQueue)
    busy: str = "loading"
    session: Session | None = None
    connections: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MOST_CONNECTIONS))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _bytes: int = 0

    @property
    def largest(self) -> int:
        """Bytes of the largest request."""
        return self.settings.policy.frame_mib * 2**20

    def claim(self, length: int) -> None:
        """Set room aside for a request that is about to be read; refuse it if others that wait leave none."""
        with self._lock:
            if self._bytes + length > _REQUESTS_AT_ONCE * self.largest:
                raise ProtocolError(f"a request of {length:,} bytes beside others that wait is too much")
            self._bytes += length

    def release(self, length: int) -> None:
        """Give back the room of a request."""
        with self._lock:
            self._bytes -= length


def serve(settings: SiloSettings) -> None:
    """Answer requests until SIGTERM or Ctrl-C."""
    require_posix("silotune worker")
    worker = _Worker(settings)

    def stop(_number: int, _frame: FrameType | None) -> None:
        if worker.busy != "loading":
            raise KeyboardInterrupt
        try:  # an import may drop what is raised in it, or make an ImportError of it
            settings.socket_path.unlink(missing_ok=True)
            _log(settings, "stopped")
        finally:
            os._exit(0)

    listener = _listen(settings.socket_path, settings.socket_group)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    threading.Thread(target=_accept, args=(listener, worker), daemon=True).start()
    try:
        from silotune.distributed.silo.session import Session

        session, metrics = Session(settings), WorkerMetrics(settings)
        session.warm()
        serve_metrics(settings.metrics_port, metrics.measures)
        _log(settings, f"ready on {settings.socket_path}")
        while True:
            worker.busy = ""
            request = worker.requests.get()
            if request.given_up.is_set():  # who still wants the reply asks again
                continue
            worker.busy = "working"
            worker.session = session
            _log(settings, _work(session, request, metrics))
    except KeyboardInterrupt:
        _log(settings, "stopped")
    finally:
        listener.close()
        settings.socket_path.unlink(missing_ok=True)


def _work(session: Session, request: _WaitingRequest, metrics: WorkerMetrics) -> str:
    """Answer one request; returns a line for the log."""
    started = time.monotonic()
    try:
        reply = session.answer(request.data)
    except (InputError, OSError) as error:
        request.reply.put(b"")
        return f"{request.kind}: no answer leaves, as it cannot be recorded: {error}"
    request.reply.put(reply)
    metrics.count(request.kind, reply, time.monotonic() - started)
    return f"{request.kind}: {time.monotonic() - started:.2f} s, {len(request.data)} → {len(reply)} bytes"


def main() -> None:
    """Entry point of `python -m silotune.distributed.silo.worker FILE`."""
    serve(read_silo_settings(sys.argv[1]))


def ping(path: Path, patience: float = 2.0) -> dict[str, object] | None:
    """Return name, process and activity of the worker behind a socket; None if no worker answers."""
    try:
        return decode(ask_worker(path, Frame("ping").encode(), patience)).fields
    except ProtocolError:
        return None


def _listen(path: Path, group: bool = False) -> socket.socket:
    """Create the worker's socket, replacing one that a killed worker left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and ping(path) is not None:
        raise InputError(f"worker: another one answers on {path}; stop it first")
    if path.exists() and not path.is_socket():
        raise InputError(f"socket: {path} is there and is no socket; name a path where nothing is")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117 if group else 0o177)  # connections from the owner only, or from the group, too
    try:
        with file_errors(f"worker: cannot listen on {path}"):
            listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(16)
    return listener


def _accept(listener: socket.socket, worker: _Worker) -> None:
    """Accept connections, one thread each, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        if worker.connections.acquire(blocking=False):
            threading.Thread(target=_connection, args=(connection, worker), daemon=True).start()
        else:  # who is turned away asks again
            connection.close()


def _connection(connection: socket.socket, worker: _Worker) -> None:
    """Read one request, wait for its reply and send that; pings are answered here."""
    settings, claimed = worker.settings, [0]

    def claim(length: int) -> None:
        worker.claim(length)
        claimed[0] = length

    with connection:
        try:
            data = receive(connection, time.monotonic() + _SLOW_PEER, worker.largest, claim)
            kind = peek_kind(data)
            if kind == "ping":
                run = {} if worker.session is None else worker.session.present
                fields = {"silo": settings.name, "busy": worker.busy, "pid": os.getpid()}
                send(connection, Frame("pong", fields | run).encode())
                return
            request = _WaitingRequest(kind, data)
            worker.requests.put(request)
            reply = _awaited(request, connection)
            if not reply:  # the records cannot be written
                return
            connection.settimeout(_SLOW_PEER)
            send(connection, reply)
        except (ProtocolError, OSError) as error:  # the peer is gone; the reply is stored for a repeated request
            _log(settings, str(error))
        finally:
            worker.release(claimed[0])
            worker.connections.release()


def _awaited(request: _WaitingRequest, connection: socket.socket) -> bytes:
    """Wait for a reply; a request whose peer hangs up before it is worked on is given up."""
    while True:
        try:
            return request.reply.get(timeout=_LOOK)
        except queue.Empty:
            if hung_up(connection):
                request.given_up.set()
                return b""


def hung_up(connection: socket.socket) -> bool:
    """Return whether the other end of a connection is gone; its next bytes, if any, stay to be read.

    The connection does not block afterwards: with a timeout, `recv` would wait, and time out as if the peer were lost.
    """
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _log(settings: SiloSettings, text: str) -> None:
    log_line(f"silotune worker {settings.name!r}: {text}")


if __name__ == "__main__":
    main()
