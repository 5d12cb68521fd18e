"""`phase_batches`: a phase's batches in micro-batches, by cost and `train.tokens_at_once`; `check_rows`' lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from silotune.data.batching import Batch, TokenLimit, epoch_batches
from silotune.data.cohort_batches import CohortMicroBatch, cut_jointly, zip_micro_batches
from silotune.methods.phase import Phase
from silotune.training.context import TrainingContext
from silotune.training.silo import Silo


def phase_batches(
    context: TrainingContext, silo: Silo, phase: Phase, number: int, own_micro_batches: bool = True
) -> Iterator[Batch]:
    """Yield a phase's batches, in the order derived for this silo and round, each `Phase.steps_per_batch` times.

    Args:
        context: the run's.
        silo: whose training rows.
        phase: sets the number of epochs.
        number: the round's number.
        own_micro_batches: cut each batch into micro-batches of its own. Otherwise `cohort_micro_batches` cuts them with
            those of other silos, unless a tuner draws random numbers: a row's draws depend on its micro-batch.
    """
    train = context.train
    cost = _call_cost(context, phase) if own_micro_batches or context.draws else None
    limit = token_limit(context, phase, [silo])

    def passes() -> Iterator[Batch]:
        count = 0
        while True:
            yield from epoch_batches(
                silo.train,
                train.batch_size,
                context.backbone.pad_id,
                context.draw_seed,
                silo.name,
                number,
                phase.name,
                count,
                call_cost=cost,
                limit=limit,
                even=train.batches == "even",
            )
            count += 1

    drawn = islice(passes(), context.batches(silo, phase))
    return (batch for batch in drawn for _ in range(phase.steps_per_batch))


def cohort_micro_batches(
    context: TrainingContext, batches: Sequence[Batch], phase: Phase, silos: Sequence[Silo]
) -> list[CohortMicroBatch]:
    """Group the rows of several silos' batches into micro-batches that share a forward."""
    limit = token_limit(context, phase, silos)
    if batches[0].micro:
        return zip_micro_batches(batches, context.backbone.pad_id, limit)
    return cut_jointly(batches, context.backbone.pad_id, _call_cost(context, phase), limit)


def token_limit(context: TrainingContext, phase: Phase, silos: Sequence[Silo]) -> TokenLimit | None:
    """Return the most tokens of a micro-batch in a phase of these silos; None: any number."""
    if context.tokens_at_once is None:
        return None
    decoders = [rows.longest_decoder for silo in silos for rows in silo.train.values()]
    beside = context.virtual_tokens + max(decoders, default=0)
    return TokenLimit(context.tokens_at_once, max(1, phase.views_with_gradient), beside)


def check_rows(context: TrainingContext, silos: Iterable[Silo]) -> None:
    """Refuse rows that are longer than `train.tokens_at_once` has room for."""
    for silo in silos:
        for phase in (*context.phases, *context.server_phases):
            limit = token_limit(context, phase, [silo])
            for rows in silo.train.values():
                if limit is not None and len(rows):
                    limit.rows(rows.longest)


def _call_cost(context: TrainingContext, phase: Phase) -> int:
    """Return the overhead of a backbone call in tokens per replica of the rows."""
    return context.backbone.call_cost // context.replicas(phase)
