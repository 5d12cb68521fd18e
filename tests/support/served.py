"""A server over run folders on a free port of the loopback, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from silotune.serve.commands import _listen
from silotune.serve.engine import Limits, ServingEngine
from silotune.serve.keys import ClientKeys
from silotune.serve.models import Models
from silotune.serve.web import make_app


@dataclass
class Server:
    """A running server."""

    port: int
    engine: ServingEngine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, key: str = "none") -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)

    def client(self, key: str = "none") -> Any:
        """A client of OpenAI's package, which takes a second to import."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


@contextmanager
def serving(*folders: Path, keys: Path | None = None, watch: bool = False, **limits: Any) -> Iterator[Server]:
    engine, listening = ServingEngine(Models(folders, watch=watch), Limits(**limits)), _listen("127.0.0.1", 0)
    app = make_app(engine, ClientKeys(keys), ("127.0.0.1", "localhost"))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="critical", access_log=False))
    engine.start()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Server(listening.getsockname()[1], engine)
    finally:
        server.should_exit = True
        thread.join()
        engine.stop()
