"""The bodies of requests, as OpenAI's and vLLM's clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from silotune.data.generation_rows import MESSAGES, TOOLS
from silotune.runs.personal_model import Text
from silotune.serve.jobs import Refusal, Write

Line = str | list[str]
"""A text, or the two of a pair."""

MOST_TEXTS, MOST_CHOICES = 256, 8


class Asked(BaseModel):
    """What every request has."""

    model: str = Field(min_length=1, max_length=500)


class StreamOptions(BaseModel):
    """What a stream has beside its pieces."""

    include_usage: bool = False


class WriteRequest(Asked):
    """What requests for written answers have in common; without a temperature the likeliest tokens are taken."""

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

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1, le=100_000)
    stop: str | list[str] | None = Field(None, max_length=1000)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        for name, harmless in cls.unsupported.items():
            if isinstance(data, dict) and name in data and data[name] not in harmless:
                raise ValueError(f"{name}: is not supported; leave it out")
        return data

    @property
    def usage_in_stream(self) -> bool:
        """Whether the stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def work(self, prompt: Text, logprobs: int | None, max_tokens: int | None) -> Write:
        """Return the work that the engine gets."""
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
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=1000)
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=100_000)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def works(self) -> list[Write]:
        """Return the work that the engine gets."""
        prompt: Text = {MESSAGES: self.messages, TOOLS: self.tools} if self.tools else self.messages
        scores = (self.top_logprobs or 0) if self.logprobs else None
        return [self.work(prompt, scores, self.max_completion_tokens or self.max_tokens)]


class CompletionRequest(WriteRequest):
    """`POST /v1/completions`; a prompt is an instruction, which the run's template surrounds as in training."""

    prompt: str | list[str] = Field(max_length=1_000_000)
    logprobs: int | None = Field(None, ge=0, le=5)

    def works(self) -> list[Write]:
        """Return the work that the engine gets for each prompt."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not 0 < len(prompts) <= MOST_TEXTS:
            raise Refusal(f"prompt: {len(prompts)} prompts; allowed: 1 to {MOST_TEXTS}")
        return [self.work(prompt, self.logprobs, self.max_tokens) for prompt in prompts]


class TextsRequest(Asked):
    """`POST /classify` and `/v1/explain`: a text, or several; a pair is a list of two."""

    input: str | list[Line]

    def texts(self) -> list[Text]:
        """Return the texts."""
        lines: list[Line] = [self.input] if isinstance(self.input, str) else self.input
        if not 0 < len(lines) <= MOST_TEXTS:
            raise Refusal(f"input: {len(lines)} texts; allowed: 1 to {MOST_TEXTS}")
        return [_line(line) for line in lines]


class EmbeddingRequest(TextsRequest):
    """`POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] = "float"


def _line(line: Line) -> Text:
    if isinstance(line, str):
        return line
    if len(line) != 2:
        raise Refusal("input: a text, or a list of the two texts of a pair")
    return line[0], line[1]
