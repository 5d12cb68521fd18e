"""Run one forward over several silos' rows, or several copies of rows, each of which is changed by parts of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from silotune.core.randomness import States, Stream
from silotune.core.tensors import Tensors
from silotune.errors import InputError
from silotune.models.backbone.forward_plan import Change, ForwardPlan, combine_plans


@dataclass(frozen=True)
class Segments:
    """The division of a forward's rows among silos, or among the views of the same rows.

    Args:
        sizes: rows of each segment, in their order.
        widths: tokens of each segment's rows, without the padding they need beside longer segments.
        streams: each silo's random numbers, for tuners that draw: changes then see one segment at a time without that
            padding, so that each silo draws as it would in a forward of its own. Empty: no tuner draws.
        stacks: stacked tensors of parts, shared by the micro-batches of one step.
    """

    sizes: list[int]
    widths: Sequence[int] = ()
    streams: Sequence[Stream] = ()
    stacks: dict[tuple[int, ...], Tensors] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of all segments."""
        return sum(self.sizes)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Split a tensor of all rows, shape (rows, …), into the segments' tensors, each (segment's rows, …)."""
        if len(tensor) != self.rows:
            raise InputError(
                f"cohort: a target module's tensor of shape {tuple(tensor.shape)} has not the {self.rows} rows of the "
                f"{len(self.sizes)} silos or views; allowed: cohort=1"
            )
        return torch.split(tensor, self.sizes)

    def stack_tensors(self, parts: Sequence[Tensors]) -> Tensors:
        """Stack one part per segment: tensors of shape (…) become (segments, …). Done once per step."""
        key = tuple(map(id, parts))
        if key not in self.stacks:
            with torch.enable_grad():  # a tensor in training says so also in a pass without graph, so dropout is drawn
                self.stacks[key] = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        return self.stacks[key]

    def group(self, x: Tensor) -> Tensor:
        """Group rows by segment for batched products.

        Args:
            x: shape (rows, tokens, width).

        Returns:
            Shape (segments, largest size · tokens, width), padded where sizes differ.
        """
        self.split(x)  # checks the rows
        rows = x if self._even else x.index_select(0, self._indices[0].to(x.device, non_blocking=True))
        return rows.reshape(len(self.sizes), -1, x.shape[-1])

    def spread(self, vectors: Tensor) -> Tensor:
        """Give every row its segment's vector: shape (segments, width) becomes (rows, 1, width)."""
        return vectors.repeat_interleave(torch.tensor(self.sizes, device=vectors.device), 0).unsqueeze(1)

    def add_product(self, y: Tensor, low: Tensor, wide: Tensor, shift: Tensor | None = None) -> Tensor:
        """Compute `y + low·wideᵀ (+ shift)`, with the segment's own factors in every row.

        Args:
            y: shape (rows, tokens, out).
            low: shape (segments, largest size · tokens, r), grouped as by `group`.
            wide: shape (segments, out, r).
            shift: shape (segments, out).

        Returns:
            Shape (rows, tokens, out).
        """
        if self._even and shift is None:
            return torch.baddbmm(self.group(y), low, wide.mT).view(y.shape)
        product = torch.bmm(low, wide.mT) if shift is None else torch.baddbmm(shift.unsqueeze(1), low, wide.mT)
        rows = product.view(-1, *y.shape[1:])
        return y + (rows if self._even else rows.index_select(0, self._indices[1].to(y.device, non_blocking=True)))

    @cached_property
    def _even(self) -> bool:
        return len({*self.sizes}) == 1

    @cached_property
    def _indices(self) -> tuple[Tensor, Tensor]:
        """For each grouped row the row it copies, shape (segments · largest size,); for each row its grouped index.

        Grouped rows that only pad copy the segment's last row.
        """
        largest = max(self.sizes)
        offsets = torch.arange(largest)
        starts = torch.tensor([0, *self.sizes]).cumsum(0)
        there = [start + offsets.clamp(max=size - 1) for start, size in zip(starts, self.sizes, strict=False)]
        back = [segment * largest + offsets[:size] for segment, size in enumerate(self.sizes)]
        return torch.cat(there), torch.cat(back)


def segment_plans(plans: Sequence[ForwardPlan], segments: Segments) -> ForwardPlan:
    """Combine plans into one in which segment i is changed as by `plans[i]`, one segment at a time.

    The plans change modules' inputs and outputs only (`ForwardPlan.by_row`). With streams, changes see a segment
    without its padding and draw from the segment's own stream.
    """

    def wrap(segment: int, change: Change) -> Change:
        stream, width = segments.streams[segment], segments.widths[segment]
        states: list[States | None] = []  # of the stream, before each run

        def unpadded(*tensors: Tensor) -> Tensor:
            current, again = stream.state, bool(states)
            if again:  # gradient checkpointing: the same numbers once more, and the stream stays as it was
                stream.state = states[0]
            else:
                states.append(current)
            with stream:
                changed = change(*(tensor[:, :width] for tensor in tensors))
            if again:
                stream.state = current
            return torch.cat([changed, tensors[-1][:, width:]], 1)

        return unpadded

    return combine_plans(plans, segments.split, wrap if segments.streams else None)
