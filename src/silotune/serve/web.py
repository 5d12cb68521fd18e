"""The server's HTTP side: who asks what, waiting for the engine, and answers in OpenAI's and vLLM's shapes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from silotune.errors import InputError
from silotune.serve import bodies
from silotune.serve.bodies import ChatRequest, CompletionRequest, EmbeddingRequest, TextsRequest, WrittenShape
from silotune.serve.engine import ServingEngine
from silotune.serve.jobs import Event, Job, Refusal, Score, Scored, Write
from silotune.serve.keys import ClientKey, ClientKeys
from silotune.serve.models import Models

BODY_BYTES, BODY_SECONDS = 2**20, 30.0

_PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"


class Asking:
    """Submits a request's jobs to the engine, and waits for their events or for the client to leave."""

    def __init__(self, engine: ServingEngine, request: Request) -> None:
        self._engine, self._request = engine, request
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._jobs: list[Job] = []

    def submit(self, model: str, owner: str, works: Sequence[Score | Write]) -> None:
        """Queue one job after the other; if one does not fit, none is answered."""
        try:
            for number, work in enumerate(works):
                self._jobs.append(self._engine.submit(model, owner, work, partial(self._deliver, number)))
        except Refusal:
            self.leave()
            raise

    def leave(self) -> None:
        """Let the engine drop what is not answered yet."""
        for job in self._jobs:
            job.ended = True

    async def next(self) -> tuple[int, Event]:
        """Return the next event, and of which job; a refusal is raised."""
        waiting = asyncio.ensure_future(self._events.get())
        gone = asyncio.ensure_future(self._until_gone())
        done, _ = await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if waiting not in done:
            waiting.cancel()
            self.leave()
            raise Refusal("the client left", 499, "gone")
        number, event = waiting.result()
        if isinstance(event, Refusal):
            self.leave()
            raise event
        return number, event

    async def _until_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    def _deliver(self, number: int, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": "`error.message` says what was wrong", "content": {"application/json": {}}}
    for status in ("4XX", "5XX")
}
"""What the schema says of answers that are errors."""


def make_app(engine: ServingEngine, keys: ClientKeys, hosts: Sequence[str] = ("*",)) -> FastAPI:
    """Make the application.

    It answers under these names in `Host`, so that no page of another site reaches a server on the loopback by a name
    of its own.
    """
    app = FastAPI(title="silotune serve", docs_url=None, redoc_url=None, responses=_ERRORS)
    app.state.engine, app.state.keys, app.state.registry = engine, keys, CollectorRegistry()
    app.add_middleware(_Bounded, measures=_measures(engine, app.state.registry))
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    app.include_router(_router)
    app.exception_handler(Refusal)(_refused)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_unknown)
    app.exception_handler(Exception)(_faulty)
    return app


def _refused(_: Request, refusal: Refusal) -> JSONResponse:
    headers = {"Retry-After": "1"} if refusal.status == 429 else None
    return JSONResponse(bodies.error(refusal), refusal.status, headers)


def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    errors = error.errors()
    first = next((each for each in errors if each["type"] in ("too_long", "too_short")), errors[0])
    place = ".".join(str(word) for word in first["loc"][1:] if "[" not in str(word))  # one of several types' name
    if first["type"] == "json_invalid":
        return JSONResponse(bodies.error(Refusal("the body is not JSON")), 400)
    return JSONResponse(bodies.error(Refusal(f"{place or 'the body'}: {first['msg']}"), place or None), 400)


def _unknown(_: Request, error: HTTPException) -> JSONResponse:
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    refusal = Refusal(str(error.detail), error.status_code, code)
    return JSONResponse(bodies.error(refusal), refusal.status, error.headers)


def _faulty(_: Request, error: Exception) -> JSONResponse:
    return _refused(_, Refusal(f"a fault of the server ({type(error).__name__})", 500, "server_error"))


def _key(request: Request) -> ClientKey:
    keys: ClientKeys = request.app.state.keys
    key = keys.of(request.headers.get("authorization", ""))
    keys.count(key)
    return key


def _operator(request: Request) -> ClientKey:
    key = _key(request)
    if not key.operator:
        raise Refusal("this needs the operator's key (`silotune serve-key --operator`)", 403, "forbidden")
    return key


Known = Annotated[ClientKey, Depends(_key)]
Operator = Annotated[ClientKey, Depends(_operator)]

_router = APIRouter()


def _whole_name(request: Request, key: ClientKey, name: str) -> str:
    whole = ""
    with suppress(InputError):
        whole = request.app.state.engine.models.find(name)
    if not whole or not key.may_ask(whole):
        raise Refusal(f"there is no model {name[:80]!r}; /v1/models lists yours", 404, "model_not_found")
    return whole


def _ask(request: Request, key: ClientKey, model: str, works: Sequence[Score | Write]) -> Asking:
    name, asking = _whole_name(request, key, model), Asking(request.app.state.engine, request)
    asking.submit(name, f"{key.name} {name}", works)
    return asking


async def _scored(request: Request, key: ClientKey, model: str, work: Score) -> Scored:
    _, event = await _ask(request, key, model, [work]).next()
    assert isinstance(event, Scored), "a job of texts has one event"
    return event


async def _written(request: Request, key: ClientKey, body: ChatRequest | CompletionRequest) -> Response:
    works = body.works()
    asking = _ask(request, key, body.model, works)
    shape = WrittenShape(isinstance(body, ChatRequest), body.model, len(works), works[0].choices)
    first = await asking.next()  # what is refused at once has a status of its own
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        events = _stream(asking, shape, first, usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    shape.keep(*first)
    while not shape.complete:
        shape.keep(*await asking.next())
    return JSONResponse(shape.whole())


async def _stream(asking: Asking, shape: WrittenShape, event: tuple[int, Event], usage: bool) -> AsyncIterator[str]:
    """Yield the events of a stream, until all choices have ended or the client has left."""
    try:
        for chunk in shape.keep(*event):
            yield bodies.event(chunk)
        while not shape.complete:
            for chunk in shape.keep(*await asking.next()):
                yield bodies.event(chunk)
        if usage:
            yield bodies.event(shape.usage())
    except Refusal as refusal:
        yield bodies.event(bodies.error(refusal))
    finally:
        asking.leave()
    yield bodies.event("[DONE]")


@_router.post("/v1/chat/completions")
async def _chat(request: Request, key: Known, body: ChatRequest) -> Response:
    return await _written(request, key, body)


@_router.post("/v1/completions")
async def _complete(request: Request, key: Known, body: CompletionRequest) -> Response:
    return await _written(request, key, body)


@_router.post("/classify")
@_router.post("/v1/classify")
async def _classify(request: Request, key: Known, body: TextsRequest) -> JSONResponse:
    scored = await _scored(request, key, body.model, Score(body.texts()))
    return JSONResponse(bodies.classified(scored, body.model))


@_router.post("/v1/entities")
async def _mark(request: Request, key: Known, body: TextsRequest) -> JSONResponse:
    scored = await _scored(request, key, body.model, Score(body.texts(), "spans"))
    return JSONResponse(bodies.marked(scored, body.model))


@_router.post("/v1/embeddings")
async def _embed(request: Request, key: Known, body: EmbeddingRequest) -> JSONResponse:
    scored = await _scored(request, key, body.model, Score(body.texts(), "vectors"))
    return JSONResponse(bodies.embedded(scored, body.model, body.encoding_format == "base64"))


@_router.post("/v1/explain")
async def _explain(request: Request, key: Operator, body: TextsRequest) -> JSONResponse:
    scored = await _scored(request, key, body.model, Score(body.texts(), "weights"))
    content = {"model": body.model, "data": list(scored.weights), "system_fingerprint": scored.digest}
    return JSONResponse(content)


@_router.get("/v1/models")
def _models(request: Request, key: Known) -> dict[str, Any]:
    models: Models = request.app.state.engine.models
    return {"object": "list", "data": [_entry(models, name) for name in models.names() if key.may_ask(name)]}


@_router.get("/v1/models/{name:path}")
def _model(request: Request, key: Known, name: str) -> dict[str, Any]:
    return _entry(request.app.state.engine.models, _whole_name(request, key, name))


def _entry(models: Models, name: str) -> dict[str, Any]:
    """Return a model's entry in `/v1/models`: OpenAI's, and what is asked of it."""
    about, created = models.about(name)
    task = about["task"]
    body = {"id": name, "object": "model", "created": created, "owned_by": about["silo"]}
    return body | {"kind": task["kind"], "labels": task.get("labels", []), "texts": about["texts"]}


@_router.get("/health")
def _health() -> dict[str, str]:
    return {"status": "ok"}


@_router.get("/metrics", response_class=PlainTextResponse)
def _metrics(request: Request) -> Response:
    if request.app.state.keys.required:
        _operator(request)
    return Response(generate_latest(request.app.state.registry), media_type="text/plain; version=0.0.4")


@_router.get("/", response_class=HTMLResponse)
def _page() -> HTMLResponse:
    return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"})


def _measures(engine: ServingEngine, registry: CollectorRegistry) -> tuple[Counter, Histogram]:
    numbers: dict[str, tuple[str, Callable[[], float]]] = {
        "waiting": ("Requests that wait.", lambda: len(engine.queue)),
        "writing": ("Answers that are being written.", lambda: engine.written),
        "models_open": ("Models that are open.", lambda: len(engine.models.opened)),
        "backbones": ("Backbones that are loaded.", lambda: len(engine.models.backbones)),
        "forwards": ("Forwards that read texts or prompts.", lambda: engine.counts["forwards"]),
        "steps": ("Forwards that wrote one more token of answers.", lambda: engine.counts["steps"]),
        "tokens": ("Tokens that were written.", lambda: engine.counts["tokens"]),
    }
    for name, (words, value) in numbers.items():
        Gauge(f"silotune_{name}", words, registry=registry).set_function(value)
    requests = Counter("silotune_requests", "Requests by path and status.", ["path", "status"], registry=registry)
    seconds = Histogram("silotune_seconds", "Seconds until a request was answered.", ["path"], registry=registry)
    return requests, seconds


class _Bounded:
    """Reads each body whole, within bounds of size and time, and counts requests."""

    def __init__(self, app: ASGIApp, measures: tuple[Counter, Histogram]) -> None:
        self._app, self._measures = app, measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.monotonic(), 499

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            body = await asyncio.wait_for(_body(receive), BODY_SECONDS)
            whole: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])
            await self._app(scope, lambda: _again(whole, receive), noted)
        except (Refusal, TimeoutError) as error:
            late = Refusal("the body did not arrive in time", 408, "timeout")
            refusal = error if isinstance(error, Refusal) else late
            await JSONResponse(bodies.error(refusal), refusal.status)(scope, receive, noted)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            requests, seconds = self._measures
            requests.labels(path, status).inc()
            seconds.labels(path).observe(time.monotonic() - begun)


async def _body(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal("the client left", 499, "gone")
        pieces.append(message.get("body", b""))
        if sum(map(len, pieces)) > BODY_BYTES:
            raise Refusal(f"the body has more than {BODY_BYTES} bytes", 413, "too_large")
        if not message.get("more_body"):
            return b"".join(pieces)


async def _again(whole: Iterator[Message], receive: Receive) -> Message:
    return next(whole, None) or await receive()
