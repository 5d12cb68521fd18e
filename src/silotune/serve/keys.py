"""Who may ask which models: a file of hashed API keys, each with its silos, and how often each may ask."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from silotune.core.files import read_json, write_text
from silotune.errors import InputError, file_errors
from silotune.serve.jobs import Refusal

_MINUTE = 60.0


class ClientKey(BaseModel):
    """One key of the file; the key itself is in no file."""

    name: str
    sha256: str = ""
    silos: tuple[str, ...] = ()
    operator: bool = False
    per_minute: int | None = None

    def may_ask(self, model: str) -> bool:
        """Return whether it may ask a model, given by its whole name."""
        return not self.silos or model in self.silos or model.rpartition("/")[2] in self.silos


class _KeyFile(BaseModel):
    keys: list[ClientKey] = []


ANYBODY = ClientKey(name="anybody")
"""Who asks a server without keys."""


class ClientKeys:
    """The keys of a server; without a file, anybody who reaches it may ask."""

    def __init__(self, file: Path | None = None) -> None:
        self._keys = None if file is None else _read(file).keys
        self._request_times: dict[str, deque[float]] = {}

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return self._keys is not None

    def of(self, authorization: str) -> ClientKey:
        """Return the key that a header `Authorization: Bearer …` has; all are compared, whichever fits."""
        if self._keys is None:
            return ANYBODY
        digest = hashlib.sha256(authorization.removeprefix("Bearer ").strip().encode()).hexdigest()
        fitting = [key for key in self._keys if hmac.compare_digest(key.sha256, digest)]
        if not fitting:
            raise Refusal("the API key is missing or unknown", 401, "invalid_api_key")
        return fitting[0]

    def count(self, key: ClientKey) -> None:
        """Count a request, or refuse it if the key has asked too often in the last minute."""
        if key.per_minute is None:
            return
        now, times = time.monotonic(), self._request_times.setdefault(key.name, deque())
        while times and times[0] < now - _MINUTE:
            times.popleft()
        if len(times) >= key.per_minute:
            raise Refusal(f"more than {key.per_minute} requests in a minute", 429, "rate_limit_exceeded")
        times.append(now)


def add_key(file: Path, name: str, silos: Sequence[str], operator: bool, per_minute: int | None) -> str:
    """Add a key to a file, or replace the one of this name; returns it, the only time."""
    entries = [key for key in _read(file).keys if key.name != name] if file.exists() else []
    secret = f"st-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    entries.append(ClientKey(name=name, sha256=digest, silos=tuple(silos), operator=operator, per_minute=per_minute))
    with file_errors(f"{file}: cannot be written"):
        write_text(file, _KeyFile(keys=entries).model_dump_json(indent=1) + "\n")
        file.chmod(0o600)
    return secret


def _read(file: Path) -> _KeyFile:
    try:
        return _KeyFile.model_validate(read_json(file))
    except (OSError, ValueError) as error:
        raise InputError(f"--keys {file}: missing or damaged; `silotune serve-key` makes it") from error
