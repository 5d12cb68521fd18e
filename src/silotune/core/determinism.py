"""Make PyTorch give equal bits for equal seeds, or name the configuration's key when an operation cannot."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.utils.deterministic

from silotune.errors import InputError

_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "FLASH_ATTENTION_DETERMINISTIC": ("1",)}
"""Environment variable → its deterministic values. cuBLAS reads its own when a process first multiplies on a GPU."""


def set_numerics(deterministic: bool, tf32: bool) -> Callable[[], None]:
    """Set this process's numerics; call it before a GPU is used. Child processes inherit the environment variables.

    With `use_deterministic_algorithms`, PyTorch's fused attention kernels take their deterministic paths, and cuDNN's
    is not used.

    Args:
        deterministic: use deterministic kernels alone; otherwise the process's settings stay as they are.
        tf32: whether products and convolutions of float32 tensors may use TensorFloat32.

    Returns:
        A function that undoes it.
    """
    undo = ExitStack()

    def put(holder: object, name: str, value: object) -> None:
        undo.callback(setattr, holder, name, getattr(holder, name))
        setattr(holder, name, value)

    if deterministic:
        for variable, values in _VARIABLES.items():
            undo.callback(_set_variable, variable, os.environ.get(variable))
            if os.environ.get(variable) not in values:
                os.environ[variable] = values[0]
        undo.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        torch.set_deterministic_debug_mode("error")
        put(torch.utils.deterministic, "fill_uninitialized_memory", False)  # for debugging; nothing here reads it
        put(torch.backends.cudnn, "deterministic", True)
        put(torch.backends.cudnn, "benchmark", False)
    allowed = "tf32" if tf32 else "ieee"
    for products, legacy in ((torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32")):
        try:
            put(products, legacy, tf32)
        except RuntimeError:  # the program has used the newer name: PyTorch refuses a mix
            put(getattr(products, "conv", products), "fp32_precision", allowed)
    return undo.close


@contextmanager
def numerics(deterministic: bool, tf32: bool) -> Iterator[None]:
    """Set the numerics while the block runs, then restore them and the number of threads, which the block may set.

    See `set_numerics`.
    """
    threads = torch.get_num_threads()
    undo = set_numerics(deterministic, tf32)
    try:
        with key_named():
            yield
    finally:
        undo()
        torch.set_num_threads(threads)


@contextmanager
def key_named() -> Iterator[None]:
    """Name the configuration's key when PyTorch refuses an operation."""
    try:
        yield
    except RuntimeError as error:
        refused = re.search(r"(\w+) does not have a deterministic implementation", str(error))
        if refused is None:
            raise
        raise InputError(
            f"precision.deterministic: {refused[1]} has no deterministic implementation on this device; allowed: "
            "precision.deterministic=false (a seed may then give other bits), or another device"
        ) from error


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
