"""`Enrollment`: the coordinator's `/v1/enroll`, where an invited silo's token registers its public key.

It stands behind the proxy, in the process of `silotune federation up`. A GET tells protocol and version.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer
from tempfile import TemporaryDirectory
from typing import Any

from silotune.config.validators import is_name
from silotune.deploy.certificates import check_public_key
from silotune.deploy.invitations import InvitationBook, InvitationRefused
from silotune.deploy.node_keys import register_node, registered_nodes, unregister_node
from silotune.deploy.party_configs import CoordinatorSettings
from silotune.distributed.protocol.frames import PROTOCOL
from silotune.errors import InputError, SilotuneError
from silotune.version import __version__

PATH = "/v1/enroll"

LARGEST_BODY = 4096
"""Bytes of a request; a public key has 250."""

SLOWEST = 10.0
"""Seconds that a connection may wait for its next bytes."""

LONGEST = 30.0
"""Seconds for a request to arrive whole."""

AT_ONCE = 8
"""Connections that are served at the same time; more wait in the kernel's queue."""

REQUESTS_A_MINUTE = 240
"""Requests of all addresses together; the proxy limits each address to fewer."""


class Enrollment:
    """Decides about requests to register a key.

    Args:
        settings: the coordinator's.
        say: called with a line for the operator.
    """

    def __init__(self, settings: CoordinatorSettings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._book = InvitationBook(Path(settings.folder))
        self._times: deque[float] = deque()
        self._guard = threading.Lock()

    def has_room(self) -> bool:
        """Return whether another request may be answered in this minute, and count it."""
        now = time.monotonic()
        with self._guard:
            while self._times and now - self._times[0] > 60:
                self._times.popleft()
            if len(self._times) >= REQUESTS_A_MINUTE:
                return False
            self._times.append(now)
            return True

    def register(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Answer a request; returns HTTP's status and the answer's fields."""
        try:
            fields = json.loads(body)
            silo, token, key = (fields[name] for name in ("silo", "token", "public_key"))
            if not all(isinstance(value, str) for value in (silo, token, key)) or not is_name(silo):
                raise ValueError
            public = check_public_key(key)
        except InputError as error:
            return 400, {"error": str(error)}
        except (ValueError, TypeError, KeyError, RecursionError):
            return 400, {"error": "not a request of `silotune silo join`"}
        try:
            with self._book.claim(silo, token, public) as invitation:
                node = None if invitation.done else self._admit(silo, public, invitation.replace)
        except InvitationRefused as error:
            return 403, {"error": str(error)}
        except SilotuneError as error:
            self._say(f"silo {silo!r} could not be enrolled: {error}")
            return 503, {"error": f"silo {silo!r}: its key could not be registered now; see the coordinator's output"}
        if node is not None:
            self._say(f"silo {silo!r} used its invitation, and is node {node}")
        return 200, {"silo": silo, "protocol": PROTOCOL, "version": __version__}

    def _admit(self, silo: str, public: bytes, replace: bool) -> str:
        """Register a key instead of the one that the invitation replaces; returns the node's id."""
        if replace and silo in registered_nodes(self._settings):
            unregister_node(self._settings, silo)
        with TemporaryDirectory(prefix="silotune-") as folder:
            path = Path(folder) / "key.pub"
            path.write_bytes(public + b"\n")
            return register_node(self._settings, silo, path)


@contextmanager
def enrollment(settings: CoordinatorSettings, say: Callable[[str], None]) -> Iterator[None]:
    """Serve `PATH` on `enrollment_port`, if the coordinator's file has one, while the context is open."""
    if settings.enrollment_port is None:
        yield
        return
    server = make_server(settings, say)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def make_server(settings: CoordinatorSettings, say: Callable[[str], None]) -> ThreadingHTTPServer:
    """Make the server; the caller serves and closes it."""
    assert settings.certificate is not None, "the file was checked"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.certificate, settings.key)
    except OSError as error:
        raise InputError(f"certificate {settings.certificate} and its key: cannot be used ({error})") from error
    try:
        return _Server((settings.host, settings.enrollment_port or 0), context, Enrollment(settings, say))
    except OSError as error:
        raise InputError(
            f"enrollment_port {settings.enrollment_port}: cannot be used ({error.strerror}); does `silotune federation "
            "up` run already?"
        ) from error


class _Server(ThreadingHTTPServer):
    """TLS, a thread for each of `AT_ONCE` connections."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext, enrolling: Enrollment) -> None:
        self.enrolling = enrolling
        self._free = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(address, _Handler)
        # the handshake is made by the connection's own thread, so that no client holds up the others
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._free.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: broken connections are the client's."""


class _Handler(BaseHTTPRequestHandler):
    """One request a connection (HTTP/1.0)."""

    timeout = SLOWEST
    server_version = "silotune"
    sys_version = ""

    def __init__(self, request: Any, client_address: Any, server: BaseServer) -> None:
        assert isinstance(server, _Server)
        self._enrolling = server.enrolling
        self._limit = threading.Timer(LONGEST, _cut, (request,))
        self._limit.daemon = True
        super().__init__(request, client_address, server)

    def setup(self) -> None:
        """Begin to count the time for the request to arrive."""
        super().setup()
        self._limit.start()

    def finish(self) -> None:
        """Count no longer."""
        self._limit.cancel()
        super().finish()

    def do_GET(self) -> None:
        """Tell protocol and version."""
        if self._allowed():
            self._reply(200, {"protocol": PROTOCOL, "version": __version__})

    def do_POST(self) -> None:
        """Register a key."""
        if not self._allowed():
            return
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or "Transfer-Encoding" in self.headers:
            self._reply(411, {"error": "Content-Length is missing"})
        elif len(length) > 6 or int(length) > LARGEST_BODY:
            self._reply(413, {"error": f"more than {LARGEST_BODY} bytes"})
        else:
            body = self.rfile.read(int(length))
            self._limit.cancel()  # the answer may take longer
            if len(body) == int(length):
                self._reply(*self._enrolling.register(body))

    def _allowed(self) -> bool:
        if self.path != PATH:
            self._reply(404, {"error": "nothing is here"})
            return False
        if not self._enrolling.has_room():
            self._reply(429, {"error": "too many requests; try again in a minute"})
            return False
        return True

    def _reply(self, status: int, fields: dict[str, Any]) -> None:
        content = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing; `Enrollment` says what matters."""


def _cut(connection: Any) -> None:
    """End a connection whose request takes too long; its thread then fails to read."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
