"""The server as its clients see it: OpenAI's client, vLLM's /classify, bad requests, keys, clients that leave."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from silotune.errors import InputError
from silotune.runs.personal_model import load_model
from silotune.serve import web
from silotune.serve.keys import ClientKeys, add_key
from tests.support.served import Server, serving
from tests.support.small_runs import SINGLE

PROMPT = "say the garden was kind"
TALK: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def writer(runs):
    """A run whose silos east and west write answers."""
    return runs.generation(
        "llama", "causal", "lora", "method={name: fedmcp}", "head.max_new_tokens=24", "train.max_length=100"
    )


@pytest.fixture(scope="module")
def server(runs, writer):
    """A server of a run that writes, of one that gives labels, of one that marks spans, and one that finds passages."""
    marking = shutil.copytree(runs.entities("bert", "lora").folder / "models" / "beta", runs.root / "marker")
    finding = shutil.copytree(runs.retrieval("bert", "lora").folder / "models" / "beta", runs.root / "finder")
    labels = runs.run("bert", "lora", "method={name: fedmcp}").folder
    with serving(writer.folder, labels, marking, finding) as running:
        yield running


def names(running: Server) -> dict[str, str]:
    """Silo → the whole name of its model."""
    return {name.rpartition("/")[2]: name for name in running.engine.models.names()}


def test_the_openai_client_writes_what_predict_does(server, writer):
    client, model = server.client(), names(server)["east"]
    expected = writer.model("east").write([PROMPT])[0]
    answer = client.chat.completions.create(model=model, messages=TALK)
    assert answer.choices[0].message.content == expected
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0
    assert len(answer.system_fingerprint) == 64
    stream = client.chat.completions.create(
        model="east", messages=TALK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage == answer.usage
    completed = client.completions.create(model=model, prompt=[PROMPT, "say a river"])
    assert [choice.text for choice in completed.choices] == writer.model("east").write([PROMPT, "say a river"])


def test_sampling_stops_and_scores(server, writer):
    client = server.client()

    def draw(**options: Any) -> list[str]:
        found = client.completions.create(model="west", prompt=PROMPT, **options)
        return [choice.text for choice in found.choices]

    drawn = draw(temperature=1.0, n=4, seed=7)
    assert len(set(drawn)) > 1
    assert draw(temperature=1.0, n=4, seed=7) == drawn
    whole = writer.model("west").write([PROMPT])[0]
    assert draw(temperature=1.0, top_p=1e-6) == [whole]
    stop = whole[len(whole) // 2 :][:2]
    assert draw(stop=[stop]) == [whole[: whole.index(stop)]]
    assert draw(stop=stop, stream=False) == [whole[: whole.index(stop)]]
    pieces = client.completions.create(model="west", prompt=PROMPT, stop=stop, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole[: whole.index(stop)]
    scored = client.chat.completions.create(model="west", messages=TALK, logprobs=True, top_logprobs=3, max_tokens=4)
    written = b"".join(bytes(token.bytes) for token in scored.choices[0].logprobs.content)
    assert written.decode(errors="replace") == scored.choices[0].message.content
    assert scored.choices[0].finish_reason in ("length", "stop")
    for token in scored.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)


def test_labels_vectors_and_models(server, runs):
    model = runs.run("bert", "lora", "method={name: fedmcp}").model("alpha")
    answer = server.post("/classify", {"model": "alpha", "input": SINGLE}).json()
    assert answer["usage"]["prompt_tokens"] > 0
    for one, own in zip(answer["data"], model.predict(SINGLE), strict=True):
        assert one["label"] == own.label
        assert dict(zip(one["classes"], one["probs"], strict=True)) == pytest.approx(own.probabilities, abs=1e-5)
    listed = server.client().models.list().data
    assert {entry.id for entry in listed} == {*names(server).values()}
    vectors = server.client().embeddings.create(model="alpha", input=SINGLE).data
    plain = server.client().embeddings.create(model="alpha", input=SINGLE, encoding_format="float").data
    assert len(vectors[0].embedding) == 32
    assert vectors[2].embedding == pytest.approx(plain[2].embedding, abs=1e-6)


def test_the_openai_client_gets_the_vectors_that_rank(server, runs):
    found = server.client().embeddings.create(model="finder", input=SINGLE, encoding_format="float").data
    expected = runs.retrieval("bert", "lora").model("beta").embed(SINGLE)
    torch.testing.assert_close(torch.tensor([one.embedding for one in found]), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(expected.norm(dim=1), torch.ones(len(SINGLE)))


def test_spans_have_places_in_the_text_as_sent(server, runs):
    texts = ["the cafe\u0301 was 👩 kind", "", "the garden was kind " * 50]  # the last is longer than train.max_length
    body = server.post("/v1/entities", {"model": "marker", "input": texts}).json()
    assert "data" in body, body
    expected = runs.entities("bert", "lora").model("beta").predict(texts)
    for text, one, own in zip(texts, body["data"], expected, strict=True):
        places = [(span["start"], span["end"], span["label"]) for span in one["spans"]]
        assert places == [(span.start, span.end, span.label) for span in own.spans]
        assert [span["text"] for span in one["spans"]] == [text[start:end] for start, end, _ in places]
    assert any(one["spans"] for one in body["data"])
    assert server.post("/v1/entities", {"model": "marker", "input": ""}).json()["data"] == [{"index": 0, "spans": []}]


BAD: list[tuple[str, Any, int, str]] = [
    ("/v1/chat/completions", {"model": "nobody", "messages": TALK}, 404, "model_not_found"),
    ("/v1/chat/completions", {"model": "alpha", "messages": TALK}, 400, "wrong_endpoint"),
    ("/classify", {"model": "east", "input": "a"}, 400, "wrong_endpoint"),
    ("/classify", {"model": "alpha", "input": "kind " * 500}, 400, "context_length_exceeded"),
    ("/classify", {"model": "alpha", "input": []}, 400, "invalid_value"),
    ("/classify", {"model": "alpha", "input": [["a", "b"]]}, 400, "invalid_value"),
    ("/classify", {"model": "alpha", "input": 3}, 400, "invalid_value"),
    ("/classify", {"input": "a"}, 400, "invalid_value"),
    ("/v1/completions", {"model": "east", "prompt": "kind " * 500}, 400, "context_length_exceeded"),
    ("/v1/completions", {"model": "east", "prompt": "a", "temperature": 9}, 400, "invalid_value"),
    ("/v1/completions", {"model": "east", "prompt": "a", "logit_bias": {"3": 1}}, 400, "invalid_value"),
    ("/v1/chat/completions", {"model": "east", "messages": [{"role": "nobody", "content": "a"}]}, 400, "invalid_value"),
    ("/v1/chat/completions", {"model": "east", "messages": [{"role": "user"}]}, 400, "invalid_value"),
    ("/v1/entities", {"model": "alpha", "input": "a"}, 400, "wrong_endpoint"),
    ("/v1/entities", {"model": "marker", "input": [["a", "b"]]}, 400, "invalid_value"),
    ("/v1/entities", {"model": "marker", "input": "kind " * 5000}, 400, "context_length_exceeded"),
    ("/classify", {"model": "marker", "input": "a"}, 400, "wrong_endpoint"),
    ("/classify", {"model": "finder", "input": "a"}, 400, "wrong_endpoint"),
    ("/v1/explain", {"model": "alpha", "input": "a"}, 403, "forbidden"),
    ("/classify", {"model": "alpha", "input": "a" * 2**21}, 413, "too_large"),
    ("/nowhere", {}, 404, "not_found"),
]


def test_too_many_texts_are_refused_by_their_number(server):
    error = server.post("/classify", {"model": "alpha", "input": ["a river"] * 257}).json()["error"]
    assert (error["message"], error["param"]) == (
        "input: List should have at most 256 items after validation, not 257",
        "input",
    )


@pytest.mark.parametrize(("path", "body", "status", "code"), BAD)
def test_bad_requests_have_one_shape(server, path, body, status, code):
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert error["message"]
    assert server.post("/classify", {"model": "alpha", "input": "a river"}).status_code == 200


def test_what_is_no_json_is_refused(server):
    answer = httpx.post(f"{server.url}/classify", content=b"{nope", headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the body is not JSON")
    foreign = httpx.get(f"{server.url}/v1/models", headers={"Host": "evil.example"})
    assert foreign.status_code == 400


def test_an_answer_nobody_waits_for_is_dropped(server):
    body = json.dumps({"model": "east", "messages": TALK, "n": 8, "temperature": 2, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    limit = time.monotonic() + 20
    while (server.engine.written or len(server.engine.queue)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert server.engine.written == 0
    assert server.post("/classify", {"model": "alpha", "input": "a river"}).status_code == 200


def test_slow_clients_hold_nobody_up(server, monkeypatch):
    """A body that does not arrive is refused in time; a stream that nobody reads is written on, and dropped."""
    monkeypatch.setattr(web, "BODY_SECONDS", 0.5)
    head = "POST /classify HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    body = json.dumps({"model": "east", "messages": TALK, "n": 8, "stream": True}).encode()
    ask = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n".encode()
    with ExitStack() as stack:
        halves, deaf = (
            [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(20)]
            for _ in range(2)
        )
        for connection in halves:
            connection.sendall(head.encode() + b'{"model":')
        for connection in deaf:
            connection.sendall(ask + b"Content-Type: application/json\r\n\r\n" + body)
        assert server.post("/classify", {"model": "alpha", "input": "a river"}).status_code == 200
        for connection in halves:
            connection.settimeout(20)
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")
    limit = time.monotonic() + 20
    while (server.engine.written or len(server.engine.queue)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert server.engine.written == 0


@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_many_requests_at_once_have_the_right_answers(server, runs, number):
    model = runs.run("bert", "lora", "method={name: fedmcp}").model("alpha")
    expected = [one.label for one in model.predict(SINGLE)]
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(16) as pool:

        def ask(place: int) -> str:
            body = {"model": "alpha", "input": SINGLE[place % 3]}
            return client.post(f"{server.url}/classify", json=body).json()["data"][0]["label"]

        found = list(pool.map(ask, range(number)))
    assert found == [expected[place % 3] for place in range(number)]
    numbers = httpx.get(f"{server.url}/metrics").text
    assert 'silotune_requests_total{path="/classify",status="200"}' in numbers


def test_keys_open_their_silos_alone(runs, tmp_path):
    folder, file = runs.run("bert", "lora", "method={name: fedmcp}").folder, tmp_path / "keys.json"
    alpha = add_key(file, "alpha's", ["alpha"], operator=False, per_minute=6)
    operator = add_key(file, "operator", [], operator=True, per_minute=None)
    assert alpha not in file.read_text()
    assert file.stat().st_mode & 0o77 == 0
    asked = {"model": "alpha", "input": "a river"}
    with serving(folder, keys=file) as running:
        assert running.post("/classify", asked).status_code == 401
        assert running.post("/classify", asked, "st-other").json()["error"]["code"] == "invalid_api_key"
        assert running.post("/classify", asked, alpha).status_code == 200
        assert running.post("/classify", asked | {"model": "beta"}, alpha).status_code == 404
        assert [entry.owned_by for entry in running.client(alpha).models.list().data] == ["alpha"]
        assert running.post("/v1/explain", asked, alpha).status_code == 403
        weights = running.post("/v1/explain", asked, operator).json()["data"]
        assert weights == [{"parts": {"global": 0.5, "private": 0.5}, "alpha": None}]
        assert httpx.get(f"{running.url}/metrics").status_code == 401
        statuses = [running.post("/classify", asked, alpha).status_code for _ in range(4)]
        assert 429 in statuses
    with pytest.raises(InputError, match="missing or damaged"):
        ClientKeys(tmp_path / "none.json")


def test_a_newer_round_is_taken_over_and_nothing_is_written(runs, tmp_path):
    older = runs.run("bert", "lora", "method={name: fedmcp}").folder
    newer = runs.run("bert", "lora", "method={name: fedmcp}", "train.lr=0.3").folder
    folder = shutil.copytree(older, tmp_path / "run")
    asked = {"model": "alpha", "input": SINGLE}
    with serving(folder, watch=True) as running:
        first = running.post("/classify", asked).json()
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        shutil.rmtree(folder / "models")
        assert running.post("/classify", asked).json()["system_fingerprint"] == first["system_fingerprint"]
        shutil.copytree(newer / "models", folder / "models")
        second = running.post("/classify", asked).json()
        assert second["system_fingerprint"] != first["system_fingerprint"]
        own = load_model(newer, "alpha").predict(SINGLE)
        for one, expected in zip(second["data"], own, strict=True):
            assert dict(zip(one["classes"], one["probs"], strict=True)) == pytest.approx(
                expected.probabilities, abs=1e-5
            )
        assert len(running.engine.models.backbones) == 1
    assert set(folder.rglob("*")) == {*before}


def test_a_swap_under_load_gives_no_wrong_answer(runs, tmp_path):
    """Every answer is that of the model whose digest it names, while folders are replaced again and again."""
    versions = [runs.run("bert", "lora", "method={name: fedmcp}", *more).folder for more in ((), ("train.lr=0.3",))]
    folder = shutil.copytree(versions[0], tmp_path / "run")
    expected = [
        [list(one.probabilities.values()) for one in load_model(version, "alpha").predict(SINGLE)]
        for version in versions
    ]
    stop, answers = threading.Event(), list[Any]()

    def ask(running: Server) -> None:
        while not stop.is_set():
            answers.append(running.post("/classify", {"model": "alpha", "input": SINGLE}))

    with serving(folder, watch=True) as running, ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, running) for _ in range(4)]
        for turn in range(1, 9):
            time.sleep(0.2)
            shutil.copytree(versions[turn % 2] / "models", tmp_path / "next")
            (folder / "models").rename(tmp_path / f"old-{turn}")
            (tmp_path / "next").rename(folder / "models")
        time.sleep(0.2)
        stop.set()
        for one in asking:
            one.result()
    assert {answer.status_code for answer in answers} == {200}
    found: dict[str, list[Any]] = {}
    for answer in map(httpx.Response.json, answers):
        found.setdefault(answer["system_fingerprint"], []).append([row["probs"] for row in answer["data"]])
    assert len(found) == 2
    for first, *more in found.values():
        assert any(
            all(row == pytest.approx(own, abs=1e-5) for row, own in zip(first, model, strict=True))
            for model in expected
        )
        assert all(row == pytest.approx(own, abs=1e-5) for other in more for row, own in zip(other, first, strict=True))


@pytest.mark.long
def test_after_a_kill_under_load_the_next_server_answers(runs, tmp_path):
    folder = runs.run("bert", "lora", "method={name: fedmcp}").folder
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    expected = [one.label for one in runs.run("bert", "lora", "method={name: fedmcp}").model("alpha").predict(SINGLE)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asked = {"model": "alpha", "input": SINGLE}
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-m", "silotune", "serve", folder, "--port", str(port)])
        whole = 0

        def ask(_: int, port: int = port) -> list[str] | None:
            try:
                answer = httpx.post(f"http://127.0.0.1:{port}/classify", json=asked, timeout=60).json()
            except httpx.HTTPError:
                return None
            return [row["label"] for row in answer["data"]]

        limit = time.monotonic() + 120
        while ask(0) is None and time.monotonic() < limit:
            time.sleep(0.2)
        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(ask, number) for number in range(2000)]
            time.sleep(1)
            process.kill()
            for one in asking:
                assert one.result() in (None, expected)
                whole += one.result() is not None
        process.wait()
        assert whole > 0
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_too_many_requests_are_refused(writer):
    with serving(writer.folder, waiting=4, written=1, begun=1) as running, ThreadPoolExecutor(32) as pool:
        asked = {"model": "east", "prompt": PROMPT}
        statuses = list(pool.map(lambda _: running.post("/v1/completions", asked).status_code, range(32)))
    assert set(statuses) == {200, 429}


def test_a_time_limit_ends_an_answer(writer):
    with serving(writer.folder, seconds=0.0) as running:
        error = running.post("/v1/completions", {"model": "east", "prompt": PROMPT})
    assert (error.status_code, error.json()["error"]["code"]) == (504, "timeout")


def test_the_page_needs_nothing_from_elsewhere(server):
    page = httpx.get(server.url)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text


def test_commands(silotune, runs, tmp_path: Path):
    folder = runs.run("bert", "lora", "method={name: fedmcp}").folder
    assert "--host 0.0.0.0: others can reach it" in silotune("serve", folder, "--host", "0.0.0.0").err
    assert "did you mean 'alpha'" in silotune("serve", folder, "--silo", "alpa").err
    assert silotune("serve-key", tmp_path / "keys.json", "--name", "a").out.startswith("st-")
    alone = shutil.copytree(folder / "models" / "alpha", tmp_path / "alone")
    about = json.loads((alone / "model.json").read_text()) | {"privacy": {"uncovered": "users of a silo's own model"}}
    (alone / "model.json").write_text(json.dumps(about))
    public = ("serve", alone, "--host", "0.0.0.0", "--keys", tmp_path / "keys.json")
    assert "allowed: --without-guarantee" in silotune(*public).err
