"""Count the rows that do not fit, template included, and say what is cut of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from silotune.data.rows import Row, SiloData
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows

ANY_LENGTH = 2**20
"""Tokens at which no row is cut."""

MOST_LOOKED_AT = 1000
"""Training rows of a silo that a run looks at, the first ones of the (shuffled) split."""


@dataclass(frozen=True)
class Cuts:
    """How many of some rows are cut.

    Args:
        lengths: tokens of each row as a whole.
        cut: which of them are cut, by their place.
        prompts: those among them whose prompt is cut, not only the answer.
        longest_prompt: tokens of the longest prompt; 0 where rows have none.
    """

    lengths: list[int]
    cut: list[int]
    prompts: list[int]
    longest_prompt: int

    @property
    def share(self) -> float:
        """The share of rows that are cut."""
        return len(self.cut) / max(1, len(self.lengths))


def count_cuts(
    task: Task,
    rows: Sequence[Row],
    tokenize: Callable[[Task, Sequence[Row]], TokenizedRows],
    whole: Callable[[Task, Sequence[Row]], TokenizedRows],
) -> Cuts:
    """Compare rows as they are trained with the same rows uncut."""
    kept, full = tokenize(task, rows), whole(task, rows)
    lengths, cut, prompts, longest = [], [], [], 0
    for place in range(full.examples):
        sequences = full.sequences([place])
        found = [_sizes(full, sequence) for sequence in sequences]
        lengths.append(max(map(sum, found)))
        longest = max(longest, max(prompt for prompt, _ in found) if full.targets is not None else 0)
        short = [_sizes(kept, sequence) for sequence in sequences]
        if short != found:
            cut.append(place)
        if full.targets is not None and any(a[0] < b[0] for a, b in zip(short, found, strict=True)):
            prompts.append(place)
    return Cuts(lengths, cut, prompts, longest)


def _sizes(rows: TokenizedRows, sequence: int) -> tuple[int, int]:
    """Return the tokens of a sequence's prompt, or of its text, and those behind it or of its decoder."""
    tokens = len(rows.ids[sequence])
    if rows.decoder is not None:
        return tokens, len(rows.decoder[sequence])
    prompt = tokens if rows.prompts is None else rows.prompts[sequence]
    return prompt, tokens - prompt


def cut_text(silo: SiloData, cuts: Cuts, max_length: int, room: int | None) -> str:
    """Say how many training rows of a silo are cut, with an example.

    Args:
        silo: the silo.
        cuts: of its first training rows.
        max_length: the most tokens of a row.
        room: the most tokens of a prompt; None where rows have no answers.
    """
    looked, first = len(cuts.lengths), cuts.cut[0]
    text = f"silo {silo.name!r}: {len(cuts.cut)} of {looked} training rows are cut, such as row {first + 1}"
    text += f" of {cuts.lengths[first]} tokens (train.max_length={max_length}"
    if room is None:
        return f"{text})"
    text += f", of which a prompt has {room} and its answer the rest)"
    if not cuts.prompts:
        return f"{text}: their answers have no end then"
    return (
        f"{text}; {len(cuts.prompts)} lose the middle of their prompt, the longest of which has {cuts.longest_prompt}"
    )
