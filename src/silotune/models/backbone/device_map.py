"""`plan_blocks` decides on which device each block is (`backbone.device_map`); accelerate plans what `auto` chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from silotune.errors import InputError
from silotune.models.backbone.architectures import ARCHITECTURES
from silotune.models.backbone.block_devices import BlockDevices
from silotune.models.backbone.device import GIB, available_devices, free_memory
from silotune.models.backbone.lm_head import without_lm_head
from silotune.models.backbone.quantization import NONE, weight_bytes

DeviceMap = str | Mapping[str, str]
"""A value of `backbone.device_map`: `auto`, or names of blocks, or of their list → device."""


def candidates(setting: DeviceMap, main: torch.device) -> list[torch.device]:
    """Return the devices that a value of `backbone.device_map` can put weights on, the main one first."""
    main = _with_index(main)
    if setting == "auto" and main.type != "cuda":
        return [main]
    if isinstance(setting, str):
        found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    else:
        found = [_device(module, name, main) for module, name in setting.items()]
    return list(dict.fromkeys([main, *found]))


def plan_blocks(
    setting: DeviceMap, model: Any, main: torch.device, dtype: torch.dtype, quantization: str = NONE
) -> BlockDevices:
    """Decide where each block goes.

    Args:
        setting: the value of `backbone.device_map`.
        model: the model without data.
        main: the run's device.
        dtype: type of the loaded weights.
        quantization: as `backbone.quantization`.
    """
    base, family = without_lm_head(model), model.config.model_type
    if family not in ARCHITECTURES:
        raise InputError(f"backbone.device_map: it is not known which modules of {family!r} are blocks; leave it out")
    lists = [stack.blocks for stack in ARCHITECTURES[family].stacks]
    blocks = {f"{name}.{index}": block for name in lists for index, block in enumerate(base.get_submodule(name))}
    main = _with_index(main)
    if isinstance(setting, str):
        devices = candidates(setting, main)
        return BlockDevices(main, _balanced(model, blocks, devices, dtype, quantization) if len(devices) > 1 else None)
    for module in setting:
        if module not in blocks and module not in lists:
            raise InputError(
                f"backbone.device_map: {module!r} is no block of this model; allowed: {', '.join(lists)} (all its "
                f"blocks), {next(iter(blocks))} to {list(blocks)[-1]}; all else is on the main device"
            )
    given = {name: setting.get(name, setting.get(name.rpartition(".")[0])) for name in blocks}
    return BlockDevices(main, {name: _device(name, device, main) for name, device in given.items() if device})


def _balanced(
    model: Any, blocks: Mapping[str, nn.Module], devices: Sequence[torch.device], dtype: torch.dtype, quantization: str
) -> dict[str, torch.device]:
    """Spread blocks over devices in their order, about equally many bytes each, as accelerate plans it."""
    infer = require_accelerate().utils.infer_auto_device_map
    sizes = [dtype.itemsize * sum(tensor.numel() for tensor in block.parameters()) for block in blocks.values()]
    whole, held = weight_bytes(model, NONE, dtype.itemsize), weight_bytes(model, quantization, dtype.itemsize)
    shrunk = max(1, held - whole + sum(sizes)) / sum(sizes)  # of a quantized block's bytes
    room = {index: free_memory(device) for index, device in enumerate(devices)}
    room[0] -= whole - sum(sizes)  # embeddings and head
    room = {index: max(0, int(free / shrunk)) for index, free in room.items()}
    fair = -(-sum(sizes) // len(devices)) + max(sizes)
    stack, classes = nn.ModuleList(blocks.values()), list({type(block).__name__ for block in blocks.values()})
    for bounds in ({index: min(free, fair) for index, free in room.items()}, room):
        chosen = infer(stack, dict(bounds), classes, dtype=dtype, clean_result=False)
        if all(isinstance(device, int) for device in chosen.values()):
            return {name: devices[chosen[str(index)]] for index, name in enumerate(blocks)}
    raise InputError(
        f"backbone.device_map=auto: {len(blocks)} blocks of up to {max(sizes) * shrunk / GIB:.1f} GiB do not fit onto "
        f"{', '.join(map(str, devices))}; use backbone.quantization or a smaller backbone"
    )


def require_accelerate() -> Any:
    """Import accelerate."""
    try:
        import accelerate
    except ImportError as error:
        raise InputError(
            "backbone.device_map: needs accelerate; install silotune[quantization], or leave it out"
        ) from error
    return accelerate


def release(model: nn.Module) -> None:
    """Remove what accelerate put on a model that was loaded onto several devices: `BlockDevices` moves activations."""
    hooks = require_accelerate().hooks
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            hooks.remove_hook_from_module(module)
            module.__dict__.pop("forward", None)  # bound to this module also in copies of it
    for name in ("to", "cuda"):
        model.__dict__.pop(name, None)


def _device(module: str, name: str, main: torch.device) -> torch.device:
    """A device that a map names."""
    available = [device for device in available_devices() if torch.device(device).type == main.type]
    if name not in available:
        raise InputError(
            f"backbone.device_map: {module} cannot be on {name!r}; allowed here, beside device={main.type}: "
            f"{', '.join(available)}"
        )
    return _with_index(torch.device(name))


def _with_index(device: torch.device) -> torch.device:
    """The device as tensors on it name theirs."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
