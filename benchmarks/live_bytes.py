"""Counts the bytes of tensors that are alive while code runs, on fake tensors too, which take no memory themselves."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations make while the mode is active, until they die.

    Storages that were there before (weights, parts) are not counted. The backward pass is counted as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        """Bytes that are alive now."""
        self.most = 0
        """Bytes that were alive at most."""
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, counted=False)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._note(tensor, counted=True)
        return result

    def _note(self, tensor: Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = storage.nbytes() if counted else 0
        self._sizes[key] = size
        self.alive += size
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.alive -= self._sizes.pop(key, 0)


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
