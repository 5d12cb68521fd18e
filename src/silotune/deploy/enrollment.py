"""The coordinator's `/v1/enroll`, where an invited silo's token registers its public key, and how a silo asks there.

It runs behind the proxy, in the process of `silotune federation up`. A GET returns protocol and version.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from silotune.config.validators import is_name
from silotune.deploy.certificates import check_public_key, issuer_of
from silotune.deploy.nodes import (
    Invitation,
    InvitationRefused,
    claim,
    has_key,
    register_node,
    registered_nodes,
    unclaim,
    unregister_node,
)
from silotune.deploy.settings import CoordinatorSettings
from silotune.distributed.protocol.frames import PROTOCOL
from silotune.errors import InputError, SilotuneError, file_errors
from silotune.version import __version__

PATH = "/v1/enroll"

LARGEST_BODY = 4096
"""Bytes of a request; a public key has 250."""

SLOWEST = 10.0
"""Seconds that a connection may wait for its next bytes."""

LARGEST_ANSWER = 65536
"""Bytes of an answer that are read."""

_FOREIGN = (18, 19, 20, 21)
"""OpenSSL's codes of certificates that an unknown authority, or none, has signed."""

PATIENCE = 300.0
"""Seconds for the coordinator's answer: registering a key takes Flower some ten."""

_VERSIONS = {"protocol": PROTOCOL, "version": __version__}


def serve_enrollment(settings: CoordinatorSettings, say: Callable[[str], None]) -> EnrollmentServer | None:
    """Serve `PATH` on `enrollment_port` from a thread, if the coordinator's file has one."""
    if settings.enrollment_port is None or settings.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with file_errors(f"certificate {settings.certificate} and its key: cannot be used"):
        context.load_cert_chain(settings.certificate, settings.key)
    handler = type("_Enrollment", (_Handler,), {"settings": settings, "say": staticmethod(say)})
    with file_errors(f"enrollment_port {settings.enrollment_port}: cannot be used; does `federation up` run already?"):
        server = EnrollmentServer((settings.host, settings.enrollment_port), handler)
    server.context = context
    # the handshake is made by the connection's own thread, so that no client holds up the others
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class EnrollmentServer(ThreadingHTTPServer):
    """The server of `PATH`, with its certificate's context."""

    context: ssl.SSLContext

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: broken connections are the client's."""


class _Handler(BaseHTTPRequestHandler):
    """One request a connection (HTTP/1.0)."""

    settings: CoordinatorSettings
    say: Callable[[str], None]
    timeout = SLOWEST
    server_version = "silotune"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path == PATH:
            self._reply(200, _VERSIONS)
        else:
            self._reply(404, {"error": "nothing is here"})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path != PATH:
            self._reply(404, {"error": "nothing is here"})
        elif not length.isascii() or not length.isdigit() or int(length) > LARGEST_BODY:
            self._reply(413, {"error": f"Content-Length: allowed: up to {LARGEST_BODY}"})
        else:
            self._reply(*register(self.settings, self.say, self.rfile.read(int(length))))

    def _reply(self, status: int, fields: dict[str, Any]) -> None:
        content = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because `register` logs."""


def register(settings: CoordinatorSettings, say: Callable[[str], None], body: bytes) -> tuple[int, dict[str, Any]]:
    """Register the key of a request, if its token may; return HTTP's status and the answer's fields."""
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
        replaces = claim(Path(settings.folder), silo, token, public)
    except InvitationRefused as error:
        return 403, {"error": str(error)}
    try:
        if not has_key(settings, silo, public):
            say(f"silo {silo!r} used its invitation, and is node {_admit(settings, silo, public, replaces)}")
    except SilotuneError as error:
        unclaim(Path(settings.folder), silo)
        say(f"silo {silo!r} could not be enrolled: {error}")
        return 503, {"error": f"silo {silo!r}: its key could not be registered now; see the coordinator's output"}
    return 200, {"silo": silo, **_VERSIONS}


def _admit(settings: CoordinatorSettings, silo: str, public: bytes, replaces: bool) -> str:
    """Register a key, instead of an earlier one if it `replaces` that; return the node's id."""
    if replaces and silo in registered_nodes(settings):
        unregister_node(settings, silo)
    with TemporaryDirectory(prefix="silotune-") as folder:
        path = Path(folder) / "key.pub"
        path.write_bytes(public + b"\n")
        return register_node(settings, silo, path)


def enroll(invitation: Invitation, public: bytes) -> None:
    """Send a silo's public key and its token to the coordinator."""
    coordinator = f"coordinator {invitation.superlink}"
    fields = {"silo": invitation.silo, "token": invitation.token, "public_key": public.decode()}
    status, answer = ask(invitation.superlink, invitation.ca, "POST", PATH, fields)
    if status == 404:
        raise InputError(f"{coordinator}: takes no enrollment; give --no-register, and it silo.key.pub")
    if status in (400, 403, 413):
        raise InputError(f"{coordinator}: {answer.get('error', status)}")
    if status != 200:
        reason = answer.get("error", f"HTTP status {status}; its SuperLink may not run")
        raise SilotuneError(f"{coordinator}: {reason}; run the same command again later")
    if {name: answer.get(name) for name in _VERSIONS} != _VERSIONS:
        raise InputError(
            f"{coordinator}: has silotune {answer.get('version')} (protocol {answer.get('protocol')}), this machine "
            f"{__version__} ({PROTOCOL}); install the same and run this again"
        )


def _proxy_to(host: str) -> str:
    """Return the proxy through which this machine's settings reach a host, without its password; empty if none."""
    if _on_this_machine(host) or urllib.request.proxy_bypass(host):
        return ""
    return urllib.request.getproxies().get("https", "").rpartition("@")[2].rpartition("//")[2]


def _on_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _issuer(client: httpx.Client, url: str) -> str:
    """Return who issued the certificate that is presented at an address; empty if nobody says."""
    with suppress(httpx.HTTPError), client.stream("GET", url) as reply:
        presented = reply.extensions["network_stream"].get_extra_info("ssl_object").getpeercert(True)
        return issuer_of(presented)
    return ""


def ask(
    address: str,
    authority: str | Path,
    method: str,
    path: str,
    fields: dict[str, Any] | None = None,
    seconds: float = PATIENCE,
) -> tuple[int, dict[str, Any]]:
    """Ask the coordinator's nginx over TLS, through the proxy that this machine's settings name, as Flower's node does.

    Connections to this machine go through no proxy.

    Returns:
        HTTP's status, and the answer's fields with its `date`, and the `days` for which the certificate is valid.
    """
    host = address.rpartition(":")[0]
    proxy, trust = _proxy_to(host), not _on_this_machine(host)
    try:
        pem = authority.read_text(encoding="ascii") if isinstance(authority, Path) else authority
        context = ssl.create_default_context(cadata=pem)
    except (OSError, ValueError) as error:
        raise InputError(f"the authority's certificate: cannot be used ({error})") from error
    url, content = f"https://{address}{path}", b""
    try:
        with (
            httpx.Client(verify=context, timeout=seconds, trust_env=trust) as client,
            client.stream(method, url, json=fields) as reply,
        ):
            certificate = reply.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
            for chunk in reply.iter_raw():
                content += chunk
                if len(content) > LARGEST_ANSWER:
                    break
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        way = f" through the proxy {proxy}" if proxy else ""
        cause = _tls_error(error)
        if cause is None:
            raise SilotuneError(f"coordinator {address}: does not answer{way} ({error})") from error
        if not isinstance(cause, ssl.SSLCertVerificationError):
            raise InputError(f"coordinator {address}: TLS failed{way} ({cause.reason}); is the name right?") from error
        reason = cause.verify_message
        if cause.verify_code in _FOREIGN:
            with httpx.Client(verify=False, timeout=seconds, trust_env=trust) as client:
                issuer = _issuer(client, f"https://{address}/health")
            reason += f"; {issuer} issued it: {proxy or 'somebody on the way'} inspects TLS?" if issuer else ""
        raise InputError(
            f"coordinator {address}: its certificate{way} is not one that the authority vouches for ({reason})"
        ) from error
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        parsed = None
    days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / 86400
    return reply.status_code, {"date": reply.headers.get("date"), "days": days} | (
        parsed if isinstance(parsed, dict) else {}
    )


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """Return the error of TLS that another one came from."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
