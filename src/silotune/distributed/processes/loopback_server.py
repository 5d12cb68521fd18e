"""`LoopbackServer`: read-only pages over HTTP on 127.0.0.1, for browsers or Prometheus on this machine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from silotune.errors import InputError

HOST = "127.0.0.1"

SLOW_PEER = 10.0
"""Seconds for a request to arrive."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every reply: no script, nothing from elsewhere, in no frame, readable by no other site."""


@dataclass(frozen=True)
class Page:
    """Content of a page and its type."""

    content: bytes
    kind: str = "text/html; charset=utf-8"


class LoopbackServer:
    """Serves pages from threads until it is closed.

    Only GET and HEAD are answered, and only where the `Host` header names this machine: a site whose name is made to
    point here (DNS rebinding) learns nothing.

    Args:
        port: the port; 0 takes a free one.
        pages: path → function that makes the page.
    """

    def __init__(self, port: int, pages: Mapping[str, Callable[[], Page]]) -> None:
        handler = type("_PageHandler", (_Handler,), {"pages": dict(pages)})
        try:
            self._server = ThreadingHTTPServer((HOST, port), handler)
        except OSError as error:
            raise InputError(f"metrics_port: {port} cannot be used ({error.strerror or error})") from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="status pages", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    pages: Mapping[str, Callable[[], Page]] = {}
    timeout = SLOW_PEER
    server_version = "silotune"
    sys_version = ""

    def do_GET(self) -> None:
        """Reply with a page."""
        port = self.connection.getsockname()[1]
        if self.headers.get("Host", "") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._reply(421, Page(b"only for 127.0.0.1 and localhost\n", "text/plain"))
            return
        make = self.pages.get(self.path.partition("?")[0])
        if make is None:
            self._reply(404, Page(b"no such page\n", "text/plain"))
            return
        try:
            page = make()
        except Exception as error:  # its text may name files
            print(f"silotune status page: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self._reply(500, Page(b"cannot be made now (see the log)\n", "text/plain"))
            return
        self._reply(200, page)

    do_HEAD = do_GET  # noqa: N815 (the base class calls it)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Reply to what is no request for a page; every method but GET and HEAD gets here."""
        self.close_connection = True
        self._reply(405 if code == 501 else code, Page(b"only GET and HEAD\n", "text/plain"))

    def _reply(self, code: int, page: Page) -> None:
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if code == 405:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the pages are read every few seconds."""
