"""`silotune worker`: one process per silo that keeps backbone and tokenized rows, behind a Unix socket.

Flower starts a process for every message; that process only hands the request on (`client_app.py`). Connections are
read in threads; torch works in the main thread alone, one request after another, so that the number of threads set
there holds for all of it.
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

from silotune.distributed.protocol.frames import Frame, ProtocolError, ask_worker, decode, peek_kind, receive, send
from silotune.distributed.silo.silo_config import SiloSettings, read_silo_settings
from silotune.errors import InputError

if TYPE_CHECKING:
    from silotune.distributed.silo.session import Session


@dataclass(frozen=True)
class _Job:
    """A request that waits for the main thread, and the queue for its reply."""

    kind: str
    request: bytes
    reply: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)


_SLOW_PEER = 60.0
"""Seconds in which a request must have arrived."""


def serve(local: SiloSettings) -> None:
    """Answer requests until the process is told to end.

    Raises:
        InputError: if another worker of this silo runs, or the socket cannot be made.
    """
    jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    state = {"busy": "loading"}

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    listener = _listen(local.socket_path, local.socket_group)
    threading.Thread(target=_accept, args=(listener, jobs, state, local.name), daemon=True).start()
    try:
        from silotune.distributed.silo.session import Session

        session = Session(local)
        session.warm()
        _log(local, f"ready on {local.socket_path}")
        while True:
            state["busy"] = ""
            job = jobs.get()
            state["busy"] = "working"
            _log(local, _work(session, job))
    except KeyboardInterrupt:
        _log(local, "stopped")
    finally:
        listener.close()
        local.socket_path.unlink(missing_ok=True)


def _work(session: Session, job: _Job) -> str:
    """Answer one request; returns a line for the log."""
    started = time.monotonic()
    reply = session.answer(job.request)
    job.reply.put(reply)
    return f"{job.kind}: {time.monotonic() - started:.2f} s, {len(job.request)} → {len(reply)} bytes"


def main() -> None:
    """Entry point of `python -m silotune.distributed.silo.worker FILE`: one silo's worker."""
    serve(read_silo_settings(sys.argv[1]))


def ping(path: Path, patience: float = 2.0) -> dict[str, object] | None:
    """What the worker behind a socket is doing; None where none answers."""
    try:
        return decode(ask_worker(path, Frame("ping").encode(), patience)).fields
    except ProtocolError:
        return None


def _listen(path: Path, group: bool = False) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and ping(path) is not None:
        raise InputError(f"worker: another one answers on {path}; stop it first")
    if path.exists() and not path.is_socket():
        raise InputError(f"socket: {path} is there and is no socket; name a path where nothing is")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117 if group else 0o177)  # the owner alone may connect, or the group as well
    try:
        listener.bind(str(path))
    except OSError as error:
        raise InputError(f"worker: cannot listen on {path} ({error.strerror or error})") from error
    finally:
        os.umask(before)
    listener.listen(16)
    return listener


def _accept(listener: socket.socket, jobs: queue.SimpleQueue[_Job], state: dict[str, str], name: str) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_connection, args=(connection, jobs, state, name), daemon=True).start()


def _connection(connection: socket.socket, jobs: queue.SimpleQueue[_Job], state: dict[str, str], name: str) -> None:
    with connection:
        try:
            data = receive(connection, time.monotonic() + _SLOW_PEER)
            kind = peek_kind(data)
            if kind == "ping":
                send(connection, Frame("pong", {"silo": name, "busy": state["busy"], "pid": os.getpid()}).encode())
                return
            job = _Job(kind, data)
            jobs.put(job)
            reply = job.reply.get()
            connection.settimeout(_SLOW_PEER)
            send(connection, reply)
        except (ProtocolError, OSError) as error:  # the peer is gone: its answer is kept
            print(f"silotune worker {name!r}: {error}", file=sys.stderr, flush=True)


def _log(local: SiloSettings, text: str) -> None:
    print(f"silotune worker {local.name!r}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
