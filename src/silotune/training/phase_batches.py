"""Draw a phase's batches and cut them into micro-batches, by the cost of calls and by `train.tokens_at_once`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from silotune.core.randomness import generator
from silotune.data.batching import Batch, MicroBatch, TokenLimit, draw_batches, epoch_batches
from silotune.data.cohort_batches import cut_jointly, join
from silotune.data.tokenized import TokenizedRows
from silotune.methods.phase import Phase
from silotune.training.context import TrainingContext
from silotune.training.silo import Silo


def phase_batches(
    context: TrainingContext, silo: Silo, phase: Phase, number: int, alone: bool = True
) -> Iterator[Batch]:
    """Return a phase's batches, in the order derived for this silo and round, each `Phase.steps_per_batch` times.

    Args:
        context: the run's.
        silo: whose training rows.
        phase: sets the number of epochs.
        number: the round's number.
        alone: cut each batch into its own micro-batches. In a cohort, `joining` cuts them with those of other silos,
            unless a tuner draws random numbers: a row's draws depend on its micro-batch.
    """
    train = context.train
    one_pass = partial(
        epoch_batches,
        drawn_windows(context, silo, silo.name, number, phase.name),
        train.batch_size,
        context.backbone.pad_id,
        context.draw_seed,
        silo.name,
        number,
        phase.name,
        call_cost=_call_cost(context, phase) if alone or context.draws else None,
        limit=token_limit(context, phase, [silo]),
        even=train.batches == "even",
    )
    return draw_batches(one_pass, context.batches(silo, phase), phase.steps_per_batch)


def drawn_windows(context: TrainingContext, silo: Silo, *purpose: str | int) -> dict[str, TokenizedRows]:
    """Return a silo's training rows, long ones with as many windows as a row may have, drawn for this purpose."""
    most, seed = context.head.long_texts.per_row, context.draw_seed
    return {
        task: rows.thinned(most, partial(generator, seed, "windows", *purpose, task))
        for task, rows in silo.train.items()
    }


def joining(
    context: TrainingContext, phase: Phase, silos: Sequence[Silo], alone: bool
) -> Callable[[Sequence[Batch]], Sequence[MicroBatch]]:
    """Return the function that makes micro-batches of the silos' batches, one per silo, in each step of a phase.

    `alone`: whether batches were cut as those of a single silo.
    """
    if alone:
        return lambda batches: batches[0].micro
    pad_id, limit = context.backbone.pad_id, token_limit(context, phase, silos)
    if context.draws:
        return partial(join, pad_id=pad_id, limit=limit)
    return partial(cut_jointly, pad_id=pad_id, call_cost=_call_cost(context, phase), limit=limit)


def token_limit(context: TrainingContext, phase: Phase, silos: Sequence[Silo]) -> TokenLimit | None:
    """Return the most tokens of a micro-batch in a phase of these silos; None: any number."""
    if context.tokens_at_once is None:
        return None
    decoders = [rows.longest_decoder for silo in silos for rows in silo.train.values()]
    beside = context.virtual_tokens + max(decoders, default=0)
    return TokenLimit(context.tokens_at_once, max(1, phase.views_with_gradient), beside)


def check_rows(context: TrainingContext, silos: Iterable[Silo], noised: bool = False) -> None:
    """Refuse rows that are longer than `train.tokens_at_once` has room for.

    Under noise (`noised`) rows of `train.max_length` need room, as whether one's row fits would tell.
    """
    most, windows = context.train.max_length, context.head.long_texts.per_row
    for silo in silos:
        for phase in (*context.phases, *context.server_phases):
            limit = token_limit(context, phase, [silo])
            for rows in silo.train.values():
                if limit is not None and noised:
                    beside = context.virtual_tokens + (0 if rows.decoder is None else most)
                    replace(limit, beside=beside).rows(most, windows if context.head.long_texts.in_windows else 1)
                elif limit is not None and len(rows):
                    limit.rows(rows.longest, min(rows.most_windows, windows))


def _call_cost(context: TrainingContext, phase: Phase) -> int:
    """Return the overhead of a backbone call in tokens per replica of the rows."""
    return context.backbone.call_cost // context.replicas(phase)
