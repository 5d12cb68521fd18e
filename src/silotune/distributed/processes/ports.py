"""`free_ports` finds ports on 127.0.0.1; `wait_for_port` waits until a supervised process listens on one.

The parties of `--engine flower-local` and of `silotune federation up` start Flower's SuperLink this way.
"""

from __future__ import annotations

import contextlib
import socket
import time

from silotune.distributed.processes.supervisor import ManagedProcess
from silotune.errors import SilotuneError


def free_ports(count: int) -> list[int]:
    """Return ports on 127.0.0.1 that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def wait_for_port(child: ManagedProcess, port: int, seconds: float) -> None:
    """Wait until a process listens on a port.

    Raises:
        SilotuneError: if the process ended, or does not listen after `seconds`.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not child.alive:
            raise SilotuneError(f"{child.name} ended with code {child.process.returncode}: {child.tail()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise SilotuneError(f"{child.name} does not listen after {seconds:g} s: {child.tail()}")
