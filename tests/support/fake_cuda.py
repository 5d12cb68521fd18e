"""CUDA devices without a GPU: tensors say that they are on `cuda:0` or another; they are checked as such, and compute.

Every operation is caught below autograd. If its tensors are on two devices, it is refused as CUDA refuses it; otherwise
the CPU computes it, so that results are real numbers. Transfers from the device to the host are counted, because each
of them makes the host wait. The backward pass alone does not run: leaves get constant gradients.

With the environment variable `SILOTUNE_TEST_DEVICE=cuda` (or `cuda:1`) the real device takes the fake one's place:
everything runs there, the backward pass too; waits are not counted.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.block_devices import BlockDevices

REAL = os.environ.get("SILOTUNE_TEST_DEVICE")
"""The real device to use; None: the fake one."""

CUDA = torch.device(REAL or "cuda:0")
GRADIENT = 0.01
"""Every element of every gradient."""

_aten = torch.ops.aten
_MAY_CROSS = {_aten._to_copy.default, _aten.copy_.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
_ALWAYS_WAIT = {
    _aten._local_scalar_dense.default: "item",
    _aten.equal.default: "equal",
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten.bincount.default: "bincount",
    _aten._unique2.default: "unique",
    _aten.unique_dim.default: "unique",
    _aten.repeat_interleave.Tensor: "repeat_interleave",
}
_syncs: Counter[str] = Counter()
_refused: set[torch.dtype] = set()
"""Types that the device does not have."""


class DeviceMismatch(RuntimeError):
    """Tensors of one operation are on two devices."""


MISMATCH: type[RuntimeError] = RuntimeError if REAL else DeviceMismatch
"""What an operation on two devices raises."""


class OnDevice(Tensor):
    """A tensor on the fake device.

    Args:
        inner: its values, on the CPU.
        device: the fake device.
    """

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device = CUDA) -> OnDevice:
        if inner.dtype in _refused:
            raise TypeError(f"the device has no {inner.dtype}")
        options = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=device, **options)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor, device: torch.device = CUDA) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"OnDevice({self.inner!r})"

    def tolist(self) -> Any:
        """Copy to the host, which PyTorch refuses for subclasses."""
        _syncs["tolist"] += 1
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class FakeCuda(TorchDispatchMode):
    """Catches operations that no tensor on the fake device takes part in, such as copies to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    devices = {tensor.device: None for tensor in tensors if isinstance(tensor, OnDevice)}
    on_device, target = bool(devices), kwargs.get("device")
    to_device = on_device if target is None else torch.device(target).type == "cuda"
    if not on_device and not to_device:
        return func(*args, **kwargs)
    if on_device:
        _check(func, args, tensors)
        _count(func, args, to_device)
    kwargs = kwargs | ({"device": torch.device("cpu")} if to_device and target is not None else {})
    inner_args, inner_kwargs = _mapped(_inner, args), {key: _mapped(_inner, value) for key, value in kwargs.items()}
    result = func(*inner_args, **inner_kwargs)
    if func._schema.is_mutable:
        for outer, inner in zip(args, inner_args, strict=True):
            if isinstance(outer, Tensor) and result is inner:
                return outer
    if not to_device:
        return result.clone() if func is _aten._to_copy.default else result
    device = next(iter(devices), CUDA) if target is None else _with_index(torch.device(target))
    return _mapped(lambda tensor: OnDevice(tensor, device), result)


def _with_index(device: torch.device) -> torch.device:
    return CUDA if device.index is None else device


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments, which are tensors, lists of tensors, and other things."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Change the tensors in an argument or result; several times as fast as PyTorch's `tree_map`."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_mapped(change, item) for item in value) if isinstance(value, list | tuple) else value


def _inner(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, OnDevice) else tensor


def _check(func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Refuse tensors on two devices. As on CUDA, one number on the CPU may join, and indices may come from there."""
    if func in _MAY_CROSS:
        return
    if func in _INDEXED:
        tensors = [args[0], *(args[2:3] if len(args) > 2 else [])]
        indices = [index for index in args[1] if index is not None]
        tensors += [index for index in indices if isinstance(index, OnDevice) or not isinstance(args[0], OnDevice)]
    devices = {tensor.device for tensor in tensors if isinstance(tensor, OnDevice) or tensor.dim()}
    if len(devices) > 1:
        raise DeviceMismatch(f"Expected all tensors to be on the same device, {devices}: {func}")


def _count(func: Any, args: Sequence[Any], to_device: bool) -> None:
    if func in _ALWAYS_WAIT:
        _syncs[_ALWAYS_WAIT[func]] += 1
    elif func in _MAY_CROSS and not (to_device and isinstance(args[0], OnDevice)):
        _syncs["to cpu"] += func is _aten.copy_.default or not to_device
    elif func in _INDEXED and any(index is not None and index.dtype is torch.bool for index in args[1]):
        _syncs["mask"] += 1


@contextmanager
def without_float64() -> Iterator[None]:
    """Refuse float64 on the device while the block runs, as Apple's `mps` does."""
    _refused.add(torch.float64)
    try:
        yield
    finally:
        _refused.clear()


@contextmanager
def counted_syncs() -> Iterator[Counter[str]]:
    """Count what makes the host wait for the device while the block runs: kind → number."""
    if REAL:
        pytest.skip("waits are counted on the fake device alone")
    before = _syncs.copy()
    counts: Counter[str] = Counter()
    yield counts
    counts.update(_syncs - before)


def build_guard() -> Path:
    """Compile the device guard, without which PyTorch knows no CUDA device, once for its code and PyTorch's version.

    Skips the test without a compiler.
    """
    code = Path(__file__).with_name("guard.cpp")
    if REAL:
        return code
    version = hashlib.sha256(f"{torch.__version__} {sys.version}".encode() + code.read_bytes()).hexdigest()[:16]
    library = code.parents[2] / "build" / f"guard-{version}.so"
    if library.exists():
        return library
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the fake CUDA device needs g++")
    library.parent.mkdir(exist_ok=True)
    root, made = Path(torch.__file__).parent, library.with_suffix(f".{os.getpid()}")
    words = ["-shared", "-fPIC", "-O1", "-std=c++20", f"-I{root}/include", str(code)]
    done = subprocess.run([compiler, *words, f"-L{root}/lib", "-lc10", "-o", str(made)], capture_output=True)
    if done.returncode:
        pytest.skip("g++ cannot compile against PyTorch's headers")
    made.replace(library)  # two workers may compile at once
    return library


def load_guard(library: Path) -> None:
    if REAL:
        return
    ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Run the fake device's operations while the block runs. Load backbones before."""
    if REAL:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**40, 2**40))
        patch.setattr(torch.autograd, "backward", _backward)
        patch.setattr(torch, "tensor", _tensor)
        with FakeCuda():
            yield


def to_fake_cuda(backbone: Backbone, blocks: Mapping[str, torch.device] | None = None) -> Backbone:
    """Move a backbone to the device, some blocks to others, inside `fake_cuda`; parameters keep their identity."""
    backbone.device, backbone.block_devices = CUDA, BlockDevices(CUDA, blocks)
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(not REAL)
    try:
        backbone.block_devices.place(backbone.model, backbone.base)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    backbone.block_devices.move_at_borders(backbone.base, backbone.known_architecture)
    return backbone


_plain_tensor = torch.tensor


def _tensor(values: Any, *, device: Any = None, **options: Any) -> Tensor:
    """Make a tensor from values; PyTorch copies them to a device below the level where operations are caught."""
    made = _plain_tensor(values, **options)
    return made if device is None else made.to(device)


def _backward(losses: Sequence[Tensor], gradients: Sequence[Tensor] = ()) -> None:
    """Give each leaf of the losses' graph a constant gradient: autograd's threads need a real device."""
    pending, seen = [loss.grad_fn for loss in losses], set()
    assert all(pending), "a loss without graph trains nothing"
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            with torch.no_grad():
                leaf.grad = torch.full_like(leaf, GRADIENT)
        pending += [parent for parent, _ in node.next_functions]


def is_on_device(backbone: Backbone) -> bool:
    return all(parameter.device.type == CUDA.type for parameter in backbone.model.parameters())


def is_tensor_on_device(tensor: Tensor) -> bool:
    return tensor.device.type == CUDA.type if REAL else isinstance(tensor, OnDevice)
