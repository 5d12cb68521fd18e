"""`silotune worker`: the process with a silo's backbone and rows, behind a Unix socket; `ping` asks it.

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
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from silotune.core.clock import log_line
from silotune.distributed.protocol.frames import Frame, ProtocolError, ask_worker, decode, peek_kind, receive, send
from silotune.distributed.silo.silo_config import SiloSettings, read_silo_settings
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.distributed.silo.session import Session
    from silotune.distributed.silo.worker_metrics import WorkerMetrics


@dataclass(frozen=True)
class _Request:
    """A request that waits for the main thread, and the queue for its reply."""

    kind: str
    data: bytes
    reply: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)


_SLOW_PEER = 60.0
"""Seconds for a request to arrive, and for a reply to be taken."""


def serve(settings: SiloSettings) -> None:
    """Answer requests until SIGTERM or Ctrl-C.

    Raises:
        InputError: another worker of this silo runs, or the socket cannot be created.
    """
    requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
    state = {"busy": "loading"}

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    listener = _listen(settings.socket_path, settings.socket_group)
    threading.Thread(target=_accept, args=(listener, requests, state, settings.name), daemon=True).start()
    try:
        from silotune.distributed.silo.session import Session
        from silotune.distributed.silo.worker_metrics import WorkerMetrics

        session, metrics = Session(settings), WorkerMetrics(settings)
        session.warm()
        metrics.serve()
        _log(settings, f"ready on {settings.socket_path}")
        while True:
            state["busy"] = ""
            request = requests.get()
            state["busy"] = "working"
            _log(settings, _work(session, request, metrics))
    except KeyboardInterrupt:
        _log(settings, "stopped")
    finally:
        listener.close()
        settings.socket_path.unlink(missing_ok=True)


def _work(session: Session, request: _Request, metrics: WorkerMetrics) -> str:
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
        listener.bind(str(path))
    except OSError as error:
        raise InputError(f"worker: cannot listen on {path} ({error.strerror or error})") from error
    finally:
        os.umask(before)
    listener.listen(16)
    return listener


def _accept(listener: socket.socket, requests: queue.SimpleQueue[_Request], state: dict[str, str], name: str) -> None:
    """Accept connections, one thread each, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_connection, args=(connection, requests, state, name), daemon=True).start()


def _connection(
    connection: socket.socket, requests: queue.SimpleQueue[_Request], state: dict[str, str], name: str
) -> None:
    """Read one request, wait for its reply and send that; pings are answered here."""
    with connection:
        try:
            data = receive(connection, time.monotonic() + _SLOW_PEER)
            kind = peek_kind(data)
            if kind == "ping":
                send(connection, Frame("pong", {"silo": name, "busy": state["busy"], "pid": os.getpid()}).encode())
                return
            request = _Request(kind, data)
            requests.put(request)
            reply = request.reply.get()
            if not reply:  # the record of what leaves cannot be written
                return
            connection.settimeout(_SLOW_PEER)
            send(connection, reply)
        except (ProtocolError, OSError) as error:  # the peer is gone; the reply is stored for a repeated request
            log_line(f"silotune worker {name!r}: {error}")


def _log(settings: SiloSettings, text: str) -> None:
    log_line(f"silotune worker {settings.name!r}: {text}")


if __name__ == "__main__":
    main()
