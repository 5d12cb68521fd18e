"""The bodies of requests and answers, as OpenAI's and vLLM's clients send and read them."""

from __future__ import annotations

import base64
import json
import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from silotune.data.generation_rows import MESSAGES, TOOLS
from silotune.data.kinds import Prediction
from silotune.runs.personal_model import Text
from silotune.serve.jobs import Event, Refusal, Scored, TextPiece, TokenScore, Write

Json = dict[str, Any]

Line = str | tuple[str, str]
"""A text, or the two of a pair."""

MOST_TEXTS, MOST_CHOICES = 256, 8


class Asked(BaseModel):
    """The field that every request has: the name of the model that is to answer."""

    model: str = Field(min_length=1, max_length=500)


class StreamOptions(BaseModel):
    """Options of a streamed answer: whether its last event tells the numbers of tokens."""

    include_usage: bool = False


class WriteRequest(Asked):
    """The fields that requests for written answers share; without a temperature the likeliest tokens are taken."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0, None),
        "presence_penalty": (0, None),
        "logit_bias": ({}, None),
        "response_format": ({"type": "text"}, None),
        "functions": ([], None),
        "echo": (False, None),
        "suffix": ("", None),
        "best_of": (1, None),
    }
    """Fields that would change the answer, and the values that do not."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(default=None, ge=-(2**53), le=2**53)
    max_tokens: int | None = Field(default=None, ge=1, le=100_000)
    stop: str | list[str] | None = Field(default=None, max_length=1000)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        for name, harmless in cls.unsupported.items():
            if isinstance(data, dict) and name in data and data[name] not in harmless:
                raise ValueError(f"{name}: is not supported; leave it out")
        return data

    def work(self, prompt: Text, logprobs: int | None, max_tokens: int | None) -> Write:
        """Return a task for the engine: to answer one prompt with the request's options."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Write(
            prompt,
            self.n or 1,
            max_tokens,
            self.temperature or 0.0,
            1.0 if self.top_p is None else self.top_p,
            self.seed,
            tuple(stop for stop in stops if stop),
            logprobs,
            bool(self.stream),
        )


class ChatRequest(WriteRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=1000)
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, le=100_000)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    def works(self) -> list[Write]:
        """Return the one task for the engine: to answer the conversation."""
        prompt: Text = {MESSAGES: self.messages, TOOLS: self.tools} if self.tools else self.messages
        scores = (self.top_logprobs or 0) if self.logprobs else None
        return [self.work(prompt, scores, self.max_completion_tokens or self.max_tokens)]


class CompletionRequest(WriteRequest):
    """The body of `POST /v1/completions`; the run's template surrounds each prompt, an instruction, as in training."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
    logprobs: int | None = Field(default=None, ge=0, le=5)

    def works(self) -> list[Write]:
        """Return one task for the engine per prompt."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [self.work(prompt, self.logprobs, self.max_tokens) for prompt in prompts]


class TextsRequest(Asked):
    """The body of `POST /classify`, `/v1/entities` and `/v1/explain`: a text, or several; a pair is a list of two."""

    input: str | Annotated[list[Line], Field(min_length=1, max_length=MOST_TEXTS)]

    def texts(self) -> list[Text]:
        """Return the request's texts as a list, even if there is only one."""
        return [self.input] if isinstance(self.input, str) else [*self.input]


class EmbeddingRequest(TextsRequest):
    """The body of `POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] = "float"


def error(refusal: Refusal, param: str | None = None) -> Json:
    """Return the body of a refusal; `param` names the field at fault."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {"error": {"message": refusal.message, "type": kind, "param": param, "code": refusal.code}}


def event(content: Json | str) -> str:
    """Return one server-sent event with this content; what is no string is written as JSON."""
    return f"data: {content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)}\n\n"


class WrittenShape:
    """Collects the pieces of the answers to one request, and forms the bodies that clients read."""

    def __init__(self, chat: bool, model: str, prompts: int, choices: int) -> None:
        self._chat, self._model, self._each = chat, model, choices
        self._pieces: list[list[TextPiece]] = [[] for _ in range(prompts * choices)]
        self._id, self._created = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", int(time.time())

    def keep(self, prompt: int, piece: Event) -> list[Json]:
        """Keep a piece of the answers to a prompt; return the bodies of the events that a stream sends for it."""
        assert isinstance(piece, TextPiece), "a prompt's events are pieces"
        number = prompt * self._each + piece.choice
        self._pieces[number].append(piece)
        begun: Json = {"index": number, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunk: Json = {"index": number, "logprobs": self._logprobs([piece]), "finish_reason": piece.reason}
        chunk |= {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
        choices = [begun, chunk] if self._chat and len(self._pieces[number]) == 1 else [chunk]
        return [self._body("chat.completion.chunk", [one]) for one in choices]

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return all(own and own[-1].reason for own in self._pieces)

    def whole(self) -> Json:
        """Return the body with all answers, for a request without a stream."""
        choices = [self._choice(number, own) for number, own in enumerate(self._pieces)]
        return self._body("chat.completion", choices) | {"usage": self._usage()}

    def usage(self) -> Json:
        """Return the body of a stream's last event, which tells the numbers of tokens."""
        return self._body("chat.completion.chunk", []) | {"usage": self._usage()}

    def _body(self, kind: str, choices: Sequence[Json]) -> Json:
        kind = kind if self._chat else "text_completion"
        digest = next(own[0].digest for own in self._pieces if own)
        body = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return body | {"system_fingerprint": digest, "choices": choices}

    def _choice(self, number: int, pieces: Sequence[TextPiece]) -> Json:
        text = "".join(piece.text for piece in pieces)
        choice: Json = {"index": number, "logprobs": self._logprobs(pieces), "finish_reason": pieces[-1].reason}
        return choice | ({"message": {"role": "assistant", "content": text}} if self._chat else {"text": text})

    def _logprobs(self, pieces: Sequence[TextPiece]) -> Json | None:
        scores = [score for piece in pieces for score in piece.scores]
        if not scores:
            return None
        if self._chat:
            return {"content": [_chat_score(score) for score in scores], "refusal": None}
        offsets = [0]
        for score in scores:
            offsets.append(offsets[-1] + len(score.token))
        return {
            "tokens": [score.token for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [{likely.token: likely.logprob for likely in score.likeliest} for score in scores],
            "text_offset": offsets[:-1],
        }

    def _usage(self) -> Json:
        prompts = sum(own[-1].prompt_tokens for own in self._pieces[:: self._each])
        return _usage(prompts, sum(own[-1].tokens for own in self._pieces))


def _chat_score(score: TokenScore) -> Json:
    def one(score: TokenScore) -> Json:
        return {"token": score.token, "logprob": score.logprob, "bytes": [*score.content]}

    return one(score) | {"top_logprobs": [one(likely) for likely in score.likeliest]}


def _usage(prompt: int, written: int = 0) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def classified(scored: Scored, model: str) -> Json:
    """Return labels and probabilities, as vLLM's `/classify` does; for a number `probs` has it alone, with no label."""
    data = [_class(number, own, scored.labels) for number, own in enumerate(scored.predictions)]
    body = {"id": f"classify-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()), "model": model}
    return body | {"data": data, "usage": _usage(scored.tokens), "system_fingerprint": scored.digest}


def _class(index: int, own: Prediction, labels: Sequence[str]) -> Json:
    if own.value is not None:
        return {"index": index, "label": None, "probs": [own.value], "num_classes": 1}
    chances = own.probabilities
    body = {"index": index, "label": max(chances, key=chances.__getitem__), "probs": [chances[name] for name in labels]}
    body |= {"num_classes": len(labels), "classes": list(labels)}
    return body if own.label else body | {"labels": list(own.labels)}


def marked(scored: Scored, model: str) -> Json:
    """Return each text's spans, with their places in it as it was sent, in code points."""
    data = [
        {"index": number, "spans": [asdict(span) for span in own.spans or ()]}
        for number, own in enumerate(scored.predictions)
    ]
    body = {"object": "list", "model": model, "data": data}
    return body | {"usage": _usage(scored.tokens), "system_fingerprint": scored.digest}


def embedded(scored: Scored, model: str, packed: bool) -> Json:
    """Return the body with the texts' vectors: numbers, or (`packed`) float32 in base64."""

    def form(vector: Sequence[float]) -> object:
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if packed else list(vector)

    data = [
        {"object": "embedding", "index": number, "embedding": form(own)} for number, own in enumerate(scored.vectors)
    ]
    usage = {name: value for name, value in _usage(scored.tokens).items() if name != "completion_tokens"}
    return {"object": "list", "data": data, "model": model, "usage": usage, "system_fingerprint": scored.digest}
