"""Rows of several silos behind one another in one forward: each segment is acted on by its own silo's parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from silotune.core.randomness import States, Stream
from silotune.core.tensors import Tensors
from silotune.errors import InputError
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.stacking import Wrap, combine_plans


@dataclass(frozen=True)
class Segments:
    """How a forward's rows are divided among silos.

    Args:
        sizes: rows of each segment, in their order.
        widths: tokens that a segment's rows have without what they were padded with beside the others.
        streams: each silo's own random numbers, where tuners draw any: a segment is then acted on alone, and without
            that padding, so that it draws as it would alone. Empty: nothing is drawn.
        stacks: parts' tensors already stacked, kept from micro-batch to micro-batch of one step.
    """

    sizes: list[int]
    widths: Sequence[int] = ()
    streams: Sequence[Stream] = ()
    stacks: dict[tuple[int, ...], Tensors] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """All of them."""
        return sum(self.sizes)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Each segment's rows of a tensor of all.

        Raises:
            InputError: for a tensor that has no such rows.
        """
        if len(tensor) != self.rows:
            raise InputError(
                f"cohort: a site's tensor of shape {tuple(tensor.shape)} has not the {self.rows} rows of the "
                f"{len(self.sizes)} silos; allowed: cohort=1"
            )
        return torch.split(tensor, self.sizes)

    def stacked(self, parts: Sequence[Tensors]) -> Tensors:
        """The segments' tensors by name with a first dimension of segments, made once."""
        key = tuple(map(id, parts))
        if key not in self.stacks:
            self.stacks[key] = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        return self.stacks[key]

    def spread(self, x: Tensor) -> Tensor:
        """Rows (rows, tokens, width) by segment: (segments, most rows · tokens, width), padded where sizes differ."""
        self.split(x)
        whole = x if self._even else x.index_select(0, self._places(x.device)[0])
        return whole.reshape(len(self.sizes), -1, x.shape[-1])

    def added(self, y: Tensor, low: Tensor, wide: Tensor, shift: Tensor | None = None) -> Tensor:
        """`y + low·wideᵀ (+ shift)`, for every row with its segment's.

        Args:
            y: shape (rows, tokens, out).
            low: shape (segments, most rows · tokens, r), as `spread` makes it.
            wide: shape (segments, out, r).
            shift: shape (segments, out).
        """
        if self._even and shift is None:
            return torch.baddbmm(self.spread(y), low, wide.mT).view(y.shape)
        product = torch.bmm(low, wide.mT) if shift is None else torch.baddbmm(shift.unsqueeze(1), low, wide.mT)
        rows = product.view(-1, *y.shape[1:])
        return y + (rows if self._even else rows.index_select(0, self._places(y.device)[1]))

    @cached_property
    def _even(self) -> bool:
        return len({*self.sizes}) == 1

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where each padded place takes its row from (an unused one: the segment's last), and where each row went."""
        there, back = self._index
        return there.to(device, non_blocking=True), back.to(device, non_blocking=True)

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        most = max(self.sizes)
        places = torch.arange(most)
        starts = torch.tensor([0, *self.sizes]).cumsum(0)
        there = [start + places.clamp(max=size - 1) for start, size in zip(starts, self.sizes, strict=False)]
        back = [number * most + places[:size] for number, size in enumerate(self.sizes)]
        return torch.cat(there), torch.cat(back)


def segmented(plans: Sequence[ForwardPlan], segments: Segments) -> ForwardPlan:
    """One plan for a forward in which segment i is changed as by `plans[i]`, one segment at a time.

    The plans change modules' inputs and outputs only (`ForwardPlan.by_row`).
    """
    return combine_plans(plans, segments.split, _alone(segments) if segments.streams else None)


def _alone(segments: Segments) -> Wrap:
    """Changes that see a segment without its padding, and draw from its own stream.

    A change that runs again (gradient checkpointing) draws again what it drew.
    """

    def wrap(number: int, change: Callable[..., Tensor]) -> Callable[..., Tensor]:
        stream, width = segments.streams[number], segments.widths[number]
        begun: list[States | None] = []

        def alone(*tensors: Tensor) -> Tensor:
            if begun:
                stream.state = begun[0]
            begun.append(stream.state)
            with stream:
                changed = change(*(tensor[:, :width] for tensor in tensors))
            return torch.cat([changed, tensors[-1][:, width:]], 1)

        return alone

    return wrap
