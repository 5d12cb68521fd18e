"""Choose how many silos train in one forward (`cohort=K|auto`), by device and memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.models.forward.mixing import can_share_forward
from silotune.training.at_once import kept_of_a_token, room_for_graphs
from silotune.training.context import TrainingContext
from silotune.training.silo import Silo

ON_A_CPU, ON_A_GPU = 8, 32
"""The largest cohort of `cohort=auto`; the second number is chosen, not measured."""


@dataclass(frozen=True)
class Cohort:
    """The number of silos that train together; `reason` says why `auto` chose no more."""

    size: int = 1
    reason: str = ""


ALONE = Cohort()


def choose_cohort(configured: int | str, context: TrainingContext, silos: Iterable[Silo]) -> Cohort:
    """Choose the cohort size of a run.

    It is the configured one; `auto` goes by backbone, tuners, and what rows hold beside their texts.
    """
    obstacle = _obstacle(context)
    if isinstance(configured, int):
        if configured > 1 and obstacle:
            raise InputError(f"cohort={configured}: {obstacle}; allowed: cohort=1 or auto")
        return Cohort(configured)
    return Cohort(1, obstacle) if obstacle else _fitting(context, silos)


def _fitting(context: TrainingContext, silos: Iterable[Silo]) -> Cohort:
    """Return the largest cohort whose activations of full-length rows fit into half of the memory that is left."""
    backbone, settings = context.backbone, context.train
    of_a_view = settings.batch_size * max(
        (_of_a_row(context, rows) for silo in silos for rows in silo.train.values()), default=settings.max_length
    )  # tokens of a silo's batch
    replicas = max(context.replicas(phase) for phase in context.phases)
    of_a_token = kept_of_a_token(settings, backbone, context.method)
    room, reason = int(room_for_graphs(backbone) / 2 / (of_a_view * replicas * of_a_token)), "half the memory"
    bound = context.tokens_at_once
    if bound is not None:
        views = max(phase.views_with_gradient for phase in context.phases)
        if (of_bound := bound // (of_a_view * max(1, views))) <= room:
            room, reason = of_bound, f"train.tokens_at_once={bound}"
    most = ON_A_CPU if backbone.device.type == "cpu" else ON_A_GPU
    if room < most:
        return Cohort(max(1, room), f"{reason} has room for {room}")
    return Cohort(most)


def _of_a_row(context: TrainingContext, rows: TokenizedRows) -> int:
    """Return the tokens of a row of full length: for a preference pair both answers, each with its decoder's tokens."""
    sequences = len(rows.sequences([0]))
    return sequences * (context.train.max_length + context.virtual_tokens + rows.longest_decoder)


def _obstacle(context: TrainingContext) -> str:
    """Return why silos cannot share a forward; empty if they can."""
    backbone = context.backbone
    if context.train.dropout:
        return "silos cannot share a forward with train.dropout, which every silo draws for itself"
    if context.head.forwards_again:
        return f"silos cannot share a forward with label words of several tokens (head={context.head.name})"
    for tuner in context.tuners:
        if not can_share_forward(backbone, tuner):
            return (
                f"silos cannot share a forward with tuner={tuner.name} on {backbone.model_type} (where a tuner only "
                "changes what layers take and give, row by row, they can)"
            )
        if tuner.draws and backbone.base.config.is_encoder_decoder:
            return f"silos cannot share a forward of an encoder–decoder with dropout in tuner={tuner.name}"
    return ""
