"""Copies of views that cut the graph: as constants, or as leaves of a new graph whose gradients can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from silotune.models.forward.views import View


class ConstantView(View):
    """Another view's readings, without gradient.

    Args:
        view: the other view.
    """

    def __init__(self, view: View) -> None:
        super().__init__({name: reading.detach() for name, reading in view.items()})
        self._view = view

    def __missing__(self, name: str) -> Tensor:
        self[name] = reading = self._view[name].detach()
        return reading


class _LeafView(View):
    """A view whose readings are leaves of a new graph, in which a loss leaves their gradients.

    Args:
        view: the readings, without graph.
    """

    def __init__(self, view: View) -> None:
        super().__init__({name: _leaf(reading) for name, reading in view.items()})
        self._view = view

    def __missing__(self, name: str) -> Tensor:
        with torch.no_grad():
            reading = self._view[name]
        self[name] = leaf = _leaf(reading)
        return leaf


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def as_leaves(views: Mapping[str, View], names: Sequence[str]) -> dict[str, View]:
    """Return the views, those of these names as leaves; a view of several names stays one."""
    leaves = {id(views[name]): _LeafView(views[name]) for name in names}
    return {name: leaves.get(id(view), view) for name, view in views.items()}
