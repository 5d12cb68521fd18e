"""A small HTTP proxy with CONNECT and a password, on this machine."""

from __future__ import annotations

import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
"""Variables that name proxies."""


class Proxy(BaseHTTPRequestHandler):
    """An HTTP proxy that lets `me` with the password `secret` through, to one port whatever host is named."""

    asked: list[str]
    port: int
    open: set[socket.socket]

    def do_CONNECT(self):
        self.asked.append(self.path)
        if self.headers["Proxy-Authorization"] != f"Basic {b64encode(b'me:secret').decode()}":
            self.send_error(407)
            return
        self.send_response(200)
        self.end_headers()
        with socket.create_connection(("127.0.0.1", self.port)) as there:
            self.open.update((there, self.connection))
            threading.Thread(target=self.pump, args=(there, self.connection), daemon=True).start()
            self.pump(self.connection, there)

    def pump(self, source, sink):
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def log_message(self, *_args):
        pass


@contextmanager
def proxy_to(port: int, asked: list[str], at: int = 0) -> Iterator[str]:
    """Run a proxy to a port of this machine, and yield its address; afterwards all connections through it are cut.

    Args:
        port: where connections go.
        asked: gets the address of each request.
        at: the proxy's own port; 0: any.
    """
    handler = type("_Proxy", (Proxy,), {"asked": asked, "port": port, "open": set()})
    server = ThreadingHTTPServer(("127.0.0.1", at), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    for connection in handler.open:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
