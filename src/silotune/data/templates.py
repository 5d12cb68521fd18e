"""Fill rows' texts into cloze and instruction templates, and shorten texts until they fit.

A cloze template ("{text} is {mask}.") has a place for the label word; an instruction template ends where the answer
begins. Rows that are too long have their texts shortened, the longest first: in a cloze from the end, in an instruction
in the middle, since its question may stand at either end. The template's own words and the mask always stay.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from silotune.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Texts = tuple[str, ...]

FillTemplate = Callable[[Texts], str]
"""A function from a row's texts to the text to encode."""

SINGLE = "{text} is {mask}."

PAIR = "{a}? {mask}, {b}"

CAUSAL_PAIR = "{a}\n{b}\nAnswer: {mask}"
"""The usual template of pairs for a causal model, which reads nothing behind the mask."""

INSTRUCTION = "### Instruction:\n{instruction}\n\n### Response:\n"

CHAT = "chat"

_SLOTS = {1: ("text",), 2: ("a", "b")}

_MASK, _SOFT = "mask", "soft"


@dataclass(frozen=True)
class ClozeTemplate:
    """Text with one place for the label word: `{mask}`, and `{text}` or (for pairs) `{a}` and `{b}`, each once.

    An optional `{soft}` is the place of a soft prompt; without it, the prompt goes before everything.
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
        texts = tuple(sorted(slot for slot in slots if slot not in (_MASK, _SOFT)))
        if slots.count(_MASK) != 1 or slots.count(_SOFT) > 1 or texts not in _SLOTS.values():
            raise InputError(
                f"head.template: {self.text!r} needs {{mask}} exactly once, and for the texts {{text}} once, or {{a}} "
                "and {b} once each; it may have {soft} once"
            )

    @cached_property
    def texts_per_row(self) -> int:
        """Number of texts per row: 1 or 2."""
        return 2 if any(slot == "a" for _, slot in _pieces(self.text)) else 1

    @cached_property
    def has_soft(self) -> bool:
        """Whether the template has a place for a soft prompt."""
        return any(slot == _SOFT for _, slot in _pieces(self.text))

    def check_ends_with_mask(self) -> None:
        """Refuse texts and words behind the mask, which a causal model does not read."""
        pieces = _pieces(self.text)
        place = next(place for place, (_, slot) in enumerate(pieces) if slot == _MASK)
        behind = [(literal, slot) for literal, slot in pieces[place + 1 :]]
        if any(slot is not None or any(map(str.isalnum, literal)) for literal, slot in behind):
            raise InputError(
                f"head.template: {self.text!r} has text behind {{mask}}, and a causal model reads what is before it "
                f"alone; allowed: a template that ends with {{mask}}, such as {CAUSAL_PAIR!r}"
            )

    def before_mask(self, texts: Texts) -> str:
        """Fill the template up to its mask, without the blank before it, which belongs to the label word."""
        filled, end = self.fill(texts, "")
        return filled[:end].rstrip(" ")

    @cached_property
    def lead(self) -> str:
        """The template's own text right before its mask."""
        return next(literal for literal, slot in _pieces(self.text) if slot == _MASK)

    def fill(self, texts: Texts, mask: str) -> tuple[str, int]:
        """Fill the template.

        Returns:
            The text, and the character position behind its mask.
        """
        filled, ends = self._filled(texts, mask)
        return filled, ends[_MASK]

    def soft_position(self, encoded: EncodedText, mask: str) -> int:
        """Return the index of the token before which the soft prompt goes."""
        soft_end = self._filled(encoded.texts, mask)[1][_SOFT]
        text_tokens = [token for token, (begin, end) in enumerate(encoded.offsets) if end > begin]
        return next((token for token in text_tokens if encoded.offsets[token][1] > soft_end), text_tokens[-1] + 1)

    def _filled(self, texts: Texts, mask: str) -> tuple[str, dict[str, int]]:
        """Fill the template; returns the text and each slot's end in it (characters)."""
        values = dict(zip(_SLOTS[self.texts_per_row], texts, strict=True)) | {_MASK: mask, _SOFT: ""}
        filled, ends = "", {}
        for literal, slot in self._pieces_without_gap:
            filled += literal
            if slot is not None:
                filled += values[slot]
                ends[slot] = len(filled)
        return filled, ends

    @cached_property
    def _pieces_without_gap(self) -> list[tuple[str, str | None]]:
        """The template's pieces; one of the two blanks around `{soft}` is removed, since `{soft}` adds no text."""
        pieces = _pieces(self.text)
        for number, (literal, slot) in enumerate(pieces):
            if slot == _SOFT:
                following, next_slot = pieces[number + 1] if number + 1 < len(pieces) else ("", None)
                if not literal and not number:
                    if following.startswith(" "):
                        pieces[1] = (following[1:], next_slot)
                elif literal.endswith(" ") and (following.startswith(" ") or (not following and next_slot is None)):
                    pieces[number] = (literal[:-1], slot)
        return pieces


@dataclass(frozen=True)
class InstructionTemplate:
    """Prompt that ends where the answer begins: `{instruction}` once, `{input}` at most once.

    Without `{input}`, a row's input follows its instruction on a new line.
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
        """Return the prompt for (instruction, input)."""
        pieces, (instruction, input_text) = _pieces(self.text), texts
        if all(slot != "input" for _, slot in pieces):
            instruction = join_lines(texts)
        values = {"instruction": instruction, "input": input_text, None: ""}
        return "".join(literal + values[slot] for literal, slot in pieces)


@dataclass(frozen=True)
class EncodedText:
    """A filled template as tokens.

    Args:
        ids: token ids.
        offsets: characters (begin, end) of each token.
        texts: the row's texts, shortened if necessary.
    """

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
    keep_ends: bool = False,
) -> list[EncodedText]:
    """Encode filled templates, shortening the rows' texts until each fits.

    The tokenizer has offsets, as any fast tokenizer. `special_tokens`: it adds its own, which a chat template contains
    already. `keep_ends`: a text loses its middle instead of its end, where a question may stand.
    """

    def encode(texts: Sequence[Texts]) -> list[EncodedText]:
        encoded: Any = tokenizer(
            [fill(row) for row in texts], add_special_tokens=special_tokens, return_offsets_mapping=True
        )
        return [
            EncodedText(*encoded_text)
            for encoded_text in zip(encoded["input_ids"], encoded["offset_mapping"], texts, strict=True)
        ]

    if not rows:
        return []
    empty = encode([("",) * len(rows[0])])[0]
    if len(empty.ids) > max_length:
        raise InputError(
            f"head.template: takes {len(empty.ids)} tokens without any text, but there is room for {max_length}; "
            "raise train.max_length"
        )
    encoded_texts = encode(rows)
    while too_long := [index for index, encoded_text in enumerate(encoded_texts) if len(encoded_text.ids) > max_length]:
        shorter = [
            _shortened(tokenizer, encoded_texts[index], len(encoded_texts[index].ids) - max_length, keep_ends)
            for index in too_long
        ]
        for index, encoded_text in zip(too_long, encode(shorter), strict=True):
            encoded_texts[index] = encoded_text
    return encoded_texts


def _shortened(tokenizer: PreTrainedTokenizerBase, row: EncodedText, excess: int, keep_ends: bool = False) -> Texts:
    """Drop about `excess` tokens (at least one) of a row's texts, from the end or the middle of the longest text."""
    tokens_of_texts: Any = tokenizer(list(row.texts), add_special_tokens=False, return_offsets_mapping=True)
    offsets = tokens_of_texts["offset_mapping"]
    lengths = [len(tokens) for tokens in offsets]
    for _ in range(excess):
        longest = lengths.index(max(lengths))
        lengths[longest] = max(lengths[longest] - 1, 0)
    shorter = []
    for text, tokens, keep in zip(row.texts, offsets, lengths, strict=True):
        # Cut before the first dropped token; with byte-level tokens the last kept one may end behind it.
        first = keep if not keep_ends else keep // 2
        end = len(text) if keep == len(tokens) else tokens[first][0] if first else 0
        begin = tokens[first - keep][0] if first < keep < len(tokens) else len(text)
        head, tail = text[:end].rstrip(), text[begin:].lstrip()
        shorter.append(" ".join(filter(None, (head, tail))) if end < len(text) else text)
    if sum(map(len, shorter)) >= sum(map(len, row.texts)):  # the dropped tokens have no characters: drop one instead
        shorter = list(row.texts)
        longest = max(range(len(shorter)), key=lambda place: len(shorter[place]))
        middle = len(shorter[longest]) // 2 if keep_ends else len(shorter[longest]) - 1
        shorter[longest] = shorter[longest][:middle] + shorter[longest][middle + 1 :]
    return tuple(shorter)


def join_lines(texts: Texts) -> str:
    """Join the texts that are not empty by line breaks."""
    return "\n".join(text for text in texts if text)


def _pieces(text: str) -> list[tuple[str, str | None]]:
    """Parse a template into (literal, slot behind it) pairs; slots have no format specification."""
    try:
        fields = list(string.Formatter().parse(text))
    except ValueError as error:
        raise InputError(f"head.template: {text!r} is no template ({error}); write a brace as {{{{ or }}}}") from error
    for _, slot, spec, conversion in fields:
        if spec or conversion or slot == "":
            raise InputError(f"head.template: {text!r}: a slot is a name in braces, such as {{text}}")
    return [(literal, slot) for literal, slot, _, _ in fields]
