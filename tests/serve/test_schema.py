"""Requests that schemathesis makes from the server's OpenAPI schema: no fault, and errors in one shape."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.served import Server, serving

schemathesis: Any = pytest.importorskip("schemathesis")

MODELS = {"/v1/chat/completions": "east", "/v1/completions": "west"}


@pytest.fixture(scope="module")
def server(runs):
    """A server of a run that writes and of one that gives labels."""
    writer = runs.generation("llama", "causal", "lora", "method={name: fedmcp}", "train.max_length=100")
    with serving(writer.folder, runs.run("bert", "lora", "method={name: fedmcp}").folder) as running:
        yield running


@pytest.fixture(scope="module")
def api_schema(server: Server):
    """The schema as clients read it."""
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api_schema")


@schema.parametrize()
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
def test_no_request_makes_a_fault(case: Any, server: Server) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODELS.get(case.path, "alpha")
        if "max_tokens" in case.body or case.path in MODELS:
            case.body["max_tokens"] = 3
    answer = case.call()
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert {"message", "type", "param", "code"} == answer.json()["error"].keys()
        assert answer.json()["error"]["message"]
