"""Render conversations with the tokenizer's chat template, and find the assistant's text in them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any

from silotune.data.rows import ASSISTANT, Turn, message_of
from silotune.data.templates import Texts, join_lines
from silotune.errors import InputError, library_errors, require_known

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""The characters of a rendered conversation from the first to before the second."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The mark by which a template says what the assistant writes."""

_DATE = date(2024, 7, 26)
"""What a template gets that asks for today's date by `strftime_now` (Llama 3.2, SmolLM3, Granite, Mistral): rows have
the same tokens on every day. It is the date that Llama 3's template has without a clock."""

_DIRECTIVES = [f"%{flag}{letter}" for letter in "aAwdbBmyYHIpMSfjUWcxXGuV" for flag in ("-", "")]
"""What a format of `strftime` may hold."""

_PROBE = "Xyzzy"
"""An answer that no template changes."""

_SYSTEM = ("system", "Be kind.")
_QUESTION = ("user", "Say it.")


class ChatTemplate:
    """A tokenizer's chat template (Jinja). One that writes the date writes 26 July 2024, on every day.

    Args:
        tokenizer: a tokenizer with a chat template.
        name: the name of the template, if the tokenizer has several; None: its default.
        options: variables for the template, such as `enable_thinking`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, name: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        template: Any = getattr(tokenizer, "chat_template", None)
        if not template:
            raise InputError("head.template: 'chat' needs a tokenizer with a chat template; this backbone's has none")
        templates: dict[str, str] = template if isinstance(template, dict) else {"default": template}
        key = "default" if name is None else name
        require_known("template in head.chat_template", key, templates)
        self._tokenizer: Any = tokenizer
        self._name = key
        self._template = _clock() * ("strftime_now" in templates[key]) + templates[key]
        self._options = dict(options or {})
        self._with_tools: dict[str, ChatTemplate] = {"": self}

    def with_tools(self, tools: str) -> ChatTemplate:
        """Return the template with tools in its prompts: JSON of a list, or nothing."""
        if tools not in self._with_tools:
            options = self._options | {"tools": json.loads(tools)}
            self._with_tools[tools] = ChatTemplate(self._tokenizer, self._name, options)
        return self._with_tools[tools]

    def prompt(self, turns: Sequence[Turn]) -> str:
        """Return the text after which the assistant's next turn begins."""
        return self._render(turns, add_generation_prompt=True)[0] + self._header

    def __call__(self, texts: Texts) -> str:
        """Return the prompt of a row that is no conversation: one turn of the user, its texts joined by line breaks."""
        return self.prompt([("user", join_lines(texts))])

    def writes(self, turns: Sequence[Turn]) -> bool:
        """Return whether the prompt has the text of each turn; white space is the template's own affair."""
        prompt = _without_spaces(self.prompt(turns))
        names = [_called(tool) for tool in self._options.get("tools", ())]
        texts = [*names, *(text for turn in turns for text in _texts(turn))]
        return all(any(form in prompt for form in _forms(text)) for text in texts)

    def text(self, turns: Sequence[Turn]) -> str:
        """Return the text of a whole conversation."""
        return self._render(turns)[0]

    @cached_property
    def turn_end(self) -> tuple[str, int | None]:
        """The text that ends the assistant's turn, up to its special token, and the token; ("", None) without one."""
        added = {str(token) for token in self._tokenizer.get_added_vocab()} | {*self._tokenizer.all_special_tokens}
        candidates = [(self._tail.index(token), -len(token), token) for token in added if token and token in self._tail]
        if not candidates:
            return "", None
        begin, _, token = min(candidates)
        return self._tail[: begin + len(token)], int(self._tokenizer.convert_tokens_to_ids(token))

    @cached_property
    def _opening(self) -> list[Turn]:
        """A question that the template takes: some templates want a system turn before it."""
        try:
            self.text([_QUESTION])
        except InputError as refusal:
            try:
                self.text([_SYSTEM, _QUESTION])
            except InputError:
                raise refusal from None
            return [_SYSTEM, _QUESTION]
        return [_QUESTION]

    @cached_property
    def _header(self) -> str:
        """The text that a template without a generation prompt writes before an answer; empty if white space."""
        turns = self._opening
        begun, answered = self._render(turns, add_generation_prompt=True)[0], self.text([*turns, (ASSISTANT, _PROBE)])
        if begun != self.text(turns) or not answered.startswith(begun) or _PROBE not in answered:
            return ""
        header = answered[len(begun) : answered.rindex(_PROBE)]
        return header if header.strip() else ""

    @cached_property
    def _tail(self) -> str:
        """The text after the last answer of a conversation."""
        rendered = self.text([*self._opening, (ASSISTANT, _PROBE)])
        return rendered[rendered.rindex(_PROBE) + len(_PROBE) :] if _PROBE in rendered else ""

    def answers(
        self, turns: Sequence[Turn], last_only: bool, untrained: Sequence[int] = ()
    ) -> tuple[str, list[Span], int]:
        """Render a conversation that ends with the assistant's turn, and find the assistant's text in it.

        A template with `{% generation %}` marks it itself. With others, a turn of the assistant is what the template
        adds to the prompt before it, and one that opens the conversation is only read. Either way, its turn end belongs
        to it where the template has one.

        Args:
            turns: the conversation.
            last_only: whether only the last turn of the assistant counts.
            untrained: turns of the assistant that do not count, from the end: −2 is the one before the last turn.

        Returns:
            The text, up to the end of the last answer; the characters of each answer; and where the last answer begins.
        """
        whole, marks = self._render(turns)
        prompt = self.prompt(turns[:-1])
        if not whole.startswith(prompt):
            raise InputError(
                "head.template: the chat template writes a prompt and the answered conversation differently, so that "
                "it cannot be trained on; choose another with head.chat_template or head.chat_kwargs"
            )
        if _GENERATION.search(self._template):
            end = self.turn_end[0]
            spans = [(first, last + len(end) * whole.startswith(end, last)) for first, last in marks if last > first]
            if not spans:
                raise InputError("head.template: the chat template marks nothing of a conversation as generated")
        else:
            spans = self._added(turns, whole, last_only)
        spans = spans[-1:] if last_only else spans
        self._check_written(turns, whole, spans)
        if untrained:
            own = [place - len(turns) for place, turn in enumerate(turns) if turn[0] == ASSISTANT]
            if len(spans) > len(own):
                raise InputError(
                    "head.template: the chat template marks a turn in several pieces, so that turns of weight 0 are "
                    "not known; use head.train_on=last"
                )
            spans = [span for span, place in zip(spans, own[-len(spans) :], strict=True) if place not in untrained]
        return whole[: spans[-1][1]], spans, len(prompt)

    def _added(self, turns: Sequence[Turn], whole: str, last_only: bool) -> list[Span]:
        spans = []
        for position, turn in enumerate(turns):
            if turn[0] != ASSISTANT or not position or (last_only and position < len(turns) - 1):
                continue  # a turn that opens the conversation has no prompt that the template could write
            prompt = self.prompt(turns[:position])
            so_far = whole if position == len(turns) - 1 else self.text(turns[: position + 1])
            added = so_far[len(prompt) :]
            if self._tail and added.endswith(self._tail):
                added = added[: len(added) - len(self._tail)] + self.turn_end[0]
            if not so_far.startswith(prompt) or not whole.startswith(prompt + added):
                raise InputError(
                    f"head.template: the chat template writes turn {position + 1} of a conversation differently once "
                    "other turns follow; use head.train_on=last"
                )
            spans.append((len(prompt), len(prompt) + len(added)))
        return spans

    def _check_written(self, turns: Sequence[Turn], whole: str, spans: Sequence[Span]) -> None:
        """Refuse a template that drops an answer from the trained text; differences in white space are accepted."""
        answers = [(number, turn) for number, turn in enumerate(turns, start=1) if turn[0] == ASSISTANT]
        written, place = _without_spaces("".join(whole[begin:end] for begin, end in spans)), 0
        for number, text in [(number, text) for number, turn in answers[-len(spans) :] for text in _texts(turn)]:
            form = next((form for form in _forms(text) if form in written[place:]), None)
            if form is None:
                raise InputError(
                    f"head.template: the chat template {self._name!r} leaves out the answer in turn {number} of a "
                    "conversation, or a part of it; allowed: a template that writes answers as they are "
                    "(head.chat_template, head.chat_kwargs), or answers without what it leaves out"
                )
            place = written.index(form, place) + len(form)

    def _render(self, turns: Sequence[Turn], add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """Fill the template; returns the text, and the characters that it marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        marked = not add_generation_prompt and _GENERATION.search(self._template) is not None
        roles = ", ".join(turn[0] for turn in turns)
        with library_errors(f"head.template: the chat template refuses turns of {roles}"):
            rendered: Any = render_jinja_template(
                conversations=[list(map(message_of, turns))],
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=marked,
                **{**self._tokenizer.special_tokens_map, **self._options},
            )
        return str(rendered[0][0]), list(rendered[1][0]) if marked else []


def _clock() -> str:
    """Return a macro that takes the place of transformers' function `strftime_now` in a template."""
    written = "".join(f"|replace({code!r}, {_DATE.strftime(code)!r})" for code in _DIRECTIVES)
    return "{% macro strftime_now(format) %}{{ format" + written + " }}{% endmacro +%}"


def _called(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool, or of the one that a call names."""
    return str(tool.get("function", tool).get("name", ""))


def _texts(turn: Turn) -> list[str]:
    """Return what a template should write of a turn: its thoughts, its content, and the names of tools it calls."""
    message = message_of(turn)
    texts = [message.get("reasoning_content", ""), message["content"], *map(_called, message.get("tool_calls", ()))]
    return [text for text in texts if text.strip()]


def _forms(text: str) -> list[str]:
    """Return the ways in which a template may write a text: as it is, or as JSON (Llama 3.1's of tools' answers)."""
    return [_without_spaces(text), _without_spaces(json.dumps(text, ensure_ascii=False)[1:-1])]


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def turn_end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end the assistant's turn in the tokenizer's chat templates; empty without a template."""
    template: Any = getattr(tokenizer, "chat_template", None)
    names = sorted(template) if isinstance(template, dict) else [None] if template else []
    ids = set()
    for name in names:
        try:
            ids.add(ChatTemplate(tokenizer, name).turn_end[1])
        except InputError:  # a template for another use, e.g. with tools alone
            continue
    return tuple(sorted(token for token in ids if token is not None))
