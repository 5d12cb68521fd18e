"""`ConversationEncoder` tokenizes conversations: token ids, which are trained, and where the last answer begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from silotune.data.chat_template import ChatTemplate, Span
from silotune.data.rows import ASSISTANT, Turn
from silotune.data.templates import encode_fitting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EncodedConversation:
    """A conversation as tokens.

    Args:
        ids: token ids.
        trained: per token, whether the assistant writes it, and the loss counts it.
        prompt: number of tokens before the last answer.
    """

    ids: list[int]
    trained: list[bool]
    prompt: int


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes conversations for a decoder-only model.

    Args:
        tokenizer: a tokenizer with offsets (any fast tokenizer).
        template: its chat template.
        last_only: whether only the assistant's last turn is trained.
        room: the most tokens before the last answer.
        max_length: the most tokens in all.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    last_only: bool
    room: int
    max_length: int

    def __call__(self, turns: Sequence[Turn], answer: str) -> EncodedConversation:
        """Encode a conversation, shortened if necessary.

        Too many turns lose the oldest, then the texts of the others are cut; the answer stays, and is cut last. An
        answer without a turn end in the template ends with the tokenizer's end token.

        Args:
            turns: the turns before the last answer.
            answer: the assistant's next turn.
        """
        conversation = [*self._fitting(list(turns)), (ASSISTANT, answer)]
        text, spans, begin = self.template.answers(conversation, self.last_only)
        ids, offsets, prompt = self._tokens(text, sorted({begin, *(span[0] for span in spans)}), begin)
        trained = [any(first <= start < end for first, end in spans) for start, _ in offsets]
        if not self.template.turn_end:
            ids, trained = [*ids, int(self._any.eos_token_id)], [*trained, True]
        return EncodedConversation(ids[: self.max_length], trained[: self.max_length], prompt)

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """Return the tokens after which the assistant's next turn begins, shortened if necessary."""
        return self._encode(self.template.prompt(self._fitting(list(turns))))[0]

    @property
    def _any(self) -> Any:
        return self.tokenizer

    def _encode(self, text: str) -> tuple[list[int], list[Span]]:
        encoded = self._any(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets: list[Span] = []
        for begin, end in encoded["offset_mapping"]:
            # Llama 3's and Pythia's tokenizers leave spaces out: one of spaces alone would begin where the next does
            offsets.append((offsets[-1][1] if begin == end and offsets else begin, end))
        return list(encoded["input_ids"]), offsets

    def _tokens(self, text: str, begins: Sequence[int], last: int) -> tuple[list[int], list[Span], int]:
        """Tokenize a conversation so that the tokens before each answer are those of its prompt alone.

        A generated answer follows the tokens of its prompt. Where the tokenizer would merge characters on both sides of
        the boundary, the text is cut there.

        Returns:
            Token ids, the characters of each token, and the number of tokens before the character `last`.
        """
        cuts: list[int] = []
        ids, offsets = self._encode(text)
        number = 0
        for begin in begins:
            prompt = self._pieces(text[:begin], cuts)[0]
            if ids[: len(prompt)] != prompt:
                cuts.append(begin)
                ids, offsets = self._pieces(text, cuts)
            if begin == last:
                number = len(prompt)
        return ids, offsets, number

    def _pieces(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[Span]]:
        ids: list[int] = []
        offsets: list[Span] = []
        for begin, end in pairwise([0, *(cut for cut in cuts if cut < len(text)), len(text)]):
            piece_ids, piece_offsets = self._encode(text[begin:end])
            ids += piece_ids
            offsets += [(first + begin, last + begin) for first, last in piece_offsets]
        return ids, offsets

    def _fitting(self, turns: list[Turn]) -> list[Turn]:
        """Shorten the turns before the last answer until their prompt has at most `room` tokens."""
        while len(self._encode(self.template.prompt(turns))[0]) > self.room:
            first = 1 if turns[0][0] == "system" else 0
            users = [place for place, (role, _) in enumerate(turns) if role == "user" and place > first]
            if not users:
                return self._cut(turns)
            turns = [*turns[:first], *turns[users[0] :]]
        return turns

    def _cut(self, turns: Sequence[Turn]) -> list[Turn]:
        """Cut the texts of turns, the longest first."""
        roles = [role for role, _ in turns]

        def fill(texts: tuple[str, ...]) -> str:
            return self.template.prompt(list(zip(roles, texts, strict=True)))

        contents = tuple(content for _, content in turns)
        (encoded,) = encode_fitting(self.tokenizer, fill, [contents], self.room, special_tokens=False)
        return list(zip(roles, encoded.texts, strict=True))
