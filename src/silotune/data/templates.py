"""Templates: how a row's texts become the text a language model reads.

A cloze template ("{text} is {mask}.") leaves a place for the label word, an instruction template leaves the answer to
be written behind it. Where a row is too long its texts are shortened, from their ends and the longest first; the
template's own words, the mask and what stands behind the texts always stay.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from silotune.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Texts = tuple[str, ...]

FillTemplate = Callable[[Texts], str]
"""A row's texts → the text to encode."""


SINGLE = "{text} is {mask}."

PAIR = "{a}? {mask}, {b}"

INSTRUCTION = "### Instruction:\n{instruction}\n\n### Response:\n"

CHAT = "chat"


_SLOTS = {1: ("text",), 2: ("a", "b")}

_MASK, _SOFT = "mask", "soft"


@dataclass(frozen=True)
class ClozeTemplate:
    """A text with one place for the label word: `{text}`, or `{a}` and `{b}` for pairs, and `{mask}`, each once.

    `{soft}`, where it is there, says where a soft prompt goes; else it goes before everything.

    Raises:
        InputError: for a template that is not of this form.
    """

    text: str

    def __post_init__(self) -> None:
        pieces = _pieces(self.text)
        slots = [slot for _, slot in pieces if slot is not None]
        for slot in slots:
            if slot not in {_MASK, _SOFT, *_SLOTS[1], *_SLOTS[2]}:
                raise InputError(
                    f"head.template: unknown slot {{{slot}}}; allowed: {{text}} or {{a}} and {{b}}, {{mask}}, {{soft}}"
                )
        if slots.count(_SOFT) > 1:
            raise InputError(f"head.template: {self.text!r} may have {{soft}} once, found {slots.count(_SOFT)}")
        if slots.count(_MASK) != 1:
            raise InputError(f"head.template: {self.text!r} needs {{mask}} exactly once, found {slots.count(_MASK)}")
        rest = sorted(slot for slot in slots if slot not in (_MASK, _SOFT))
        if tuple(rest) not in _SLOTS.values():
            raise InputError(
                f"head.template: {self.text!r} needs {{text}} once, or {{a}} and {{b}} once each, for the texts"
            )

    @cached_property
    def texts(self) -> int:
        """How many texts of a row it takes: 1 or 2."""
        return 2 if any(slot == "a" for _, slot in _pieces(self.text)) else 1

    @cached_property
    def has_soft(self) -> bool:
        """Whether it says where a soft prompt goes."""
        return any(slot == _SOFT for _, slot in _pieces(self.text))

    def fill(self, texts: Texts, mask: str) -> tuple[str, int]:
        """The filled template, and the position behind the mask in it (characters)."""
        filled, ends = self._filled(texts, mask)
        return filled, ends[_MASK]

    def soft_position(self, one: EncodedText, mask: str) -> int:
        """Before which token of a filled template (and of its special tokens) the soft prompt goes."""
        place = self._filled(one.texts, mask)[1][_SOFT]
        own = [token for token, (begin, end) in enumerate(one.offsets) if end > begin]
        return next((token for token in own if one.offsets[token][1] > place), own[-1] + 1)

    def _filled(self, texts: Texts, mask: str) -> tuple[str, dict[str, int]]:
        """The filled template, and where each slot ends in it."""
        values = dict(zip(_SLOTS[self.texts], texts, strict=True)) | {_MASK: mask, _SOFT: ""}
        filled, ends = "", {}
        for literal, slot in self._close_to_soft:
            filled += literal
            if slot is not None:
                filled += values[slot]
                ends[slot] = len(filled)
        return filled, ends

    @cached_property
    def _close_to_soft(self) -> list[tuple[str, str | None]]:
        """The template's pieces, with one of the blanks around a place for vectors: they take no room in the text."""
        pieces = _pieces(self.text)
        for number, (literal, slot) in enumerate(pieces):
            if slot == _SOFT:
                following, behind = pieces[number + 1] if number + 1 < len(pieces) else ("", None)
                if not literal and not number:
                    if following.startswith(" "):
                        pieces[1] = (following[1:], behind)
                elif literal.endswith(" ") and (following.startswith(" ") or (not following and behind is None)):
                    pieces[number] = (literal[:-1], slot)
        return pieces


@dataclass(frozen=True)
class InstructionTemplate:
    """A prompt that ends where the answer begins: `{instruction}` once, `{input}` at most once.

    Without `{input}` a row's input follows its instruction on a new line.

    Raises:
        InputError: for a template that is not of this form.
    """

    text: str = INSTRUCTION

    def __post_init__(self) -> None:
        slots = [slot for _, slot in _pieces(self.text) if slot is not None]
        for slot in slots:
            if slot not in ("instruction", "input"):
                raise InputError(
                    f"head.template: unknown slot {{{slot}}}; allowed: {{instruction}}, {{input}}, or 'chat'"
                )
        if slots.count("instruction") != 1 or slots.count("input") > 1:
            raise InputError(f"head.template: {self.text!r} needs {{instruction}} once, and {{input}} at most once")

    def __call__(self, texts: Texts) -> str:
        """The prompt of (instruction, input)."""
        instruction, given = texts
        slots = [slot for _, slot in _pieces(self.text)]
        if "input" not in slots:
            instruction, given = _together(texts), ""
        values = {"instruction": instruction, "input": given, None: ""}
        return "".join(literal + values[slot] for literal, slot in _pieces(self.text))


def chat_template(tokenizer: PreTrainedTokenizerBase) -> FillTemplate:
    """Prompts by the tokenizer's own (Jinja) chat template: one turn of the user, then the assistant's turn opens.

    Raises:
        InputError: if the tokenizer has none.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("head.template: 'chat' needs a tokenizer with a chat template; this backbone's has none")

    def fill(texts: Texts) -> str:
        turns = [{"role": "user", "content": _together(texts)}]
        return cast(str, tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    return fill


@dataclass(frozen=True)
class EncodedText:
    """One filled template: token ids, each token's characters (begin, end), and the texts as far as they were kept."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    texts: Texts


def encode_fitting(
    tokenizer: PreTrainedTokenizerBase,
    fill: FillTemplate,
    rows: Sequence[Texts],
    max_length: int,
    *,
    special_tokens: bool = True,
) -> list[EncodedText]:
    """Encode filled templates, shortening the rows' texts until each fits.

    Args:
        tokenizer: one with offsets (any fast tokenizer).
        fill: the template.
        rows: the texts of each row.
        max_length: tokens, special tokens included.
        special_tokens: whether the tokenizer adds its own (a chat template writes them itself).

    Raises:
        InputError: if the template does not even fit with empty texts.
    """

    def encode(texts: Sequence[Texts]) -> list[EncodedText]:
        found: Any = tokenizer(
            [fill(row) for row in texts], add_special_tokens=special_tokens, return_offsets_mapping=True
        )
        return [EncodedText(*one) for one in zip(found["input_ids"], found["offset_mapping"], texts, strict=True)]

    if not rows:
        return []
    empty = encode([("",) * len(rows[0])])[0]
    if len(empty.ids) > max_length:
        raise InputError(
            f"head.template: takes {len(empty.ids)} tokens without any text, but there is room for {max_length}; "
            "raise train.max_length"
        )
    result = encode(rows)
    while long := [place for place, one in enumerate(result) if len(one.ids) > max_length]:
        shorter = [_shortened(tokenizer, result[place], len(result[place].ids) - max_length) for place in long]
        for place, one in zip(long, encode(shorter), strict=True):
            result[place] = one
    return result


def _shortened(tokenizer: PreTrainedTokenizerBase, row: EncodedText, excess: int) -> Texts:
    """The row's texts with about `excess` tokens fewer, at least one, taken from the end of the longest."""
    found: Any = tokenizer(list(row.texts), add_special_tokens=False, return_offsets_mapping=True)
    offsets = found["offset_mapping"]
    kept = [len(tokens) for tokens in offsets]
    for _ in range(excess):
        longest = kept.index(max(kept))
        kept[longest] = max(kept[longest] - 1, 0)
    shorter = []
    for text, tokens, keep in zip(row.texts, offsets, kept, strict=True):
        # Cut before the first dropped token: the end of the last kept one may reach over it (byte-level pieces).
        end = len(text) if keep == len(tokens) else tokens[keep][0] if keep else 0
        shorter.append(text[:end].rstrip() if end < len(text) else text)
    if shorter == list(row.texts):  # tokens without characters of their own: drop a character instead
        longest = max(range(len(shorter)), key=lambda place: len(shorter[place]))
        shorter[longest] = shorter[longest][:-1]
    return tuple(shorter)


def _together(texts: Texts) -> str:
    return "\n".join(text for text in texts if text)


def _pieces(text: str) -> list[tuple[str, str | None]]:
    """(literal, slot behind it) …; a slot carries no format of its own."""
    try:
        found = list(string.Formatter().parse(text))
    except ValueError as error:
        raise InputError(f"head.template: {text!r} is no template ({error}); write a brace as {{{{ or }}}}") from error
    for _, slot, form, conversion in found:
        if form or conversion or slot == "":
            raise InputError(f"head.template: {text!r}: a slot is a name in braces, such as {{text}}")
    return [(literal, slot) for literal, slot, _, _ in found]
