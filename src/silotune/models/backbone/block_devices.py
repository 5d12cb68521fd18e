"""Decide on which device each block of a backbone is (`backbone.device_map`), and move weights and activations there.

Blocks alone are spread. Embeddings, final norm and language-model head are on the main device, where parts of a model,
inputs and readings are too; a block's part of a tuner is copied beside the block for each forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from silotune.core.tensors import Tensors
from silotune.errors import InputError, needs
from silotune.models.backbone.architectures import ARCHITECTURES, Architecture
from silotune.models.backbone.device import GIB, free_memory
from silotune.models.backbone.lm_head import without_lm_head
from silotune.models.backbone.quantization import NONE, weight_bytes


class BlockDevices:
    """The devices of a backbone's blocks.

    Args:
        main: the device of everything that is no block.
        devices: block's name in the base transformer → its device; blocks without an entry are on the main one.
    """

    def __init__(self, main: torch.device, devices: Mapping[str, torch.device] | None = None) -> None:
        self.main = main
        self._elsewhere = {name: device for name, device in (devices or {}).items() if device != main}
        self._devices: dict[str, torch.device] = {}

    @property
    def all(self) -> list[torch.device]:
        """The devices in use, the main one first."""
        return list(dict.fromkeys([self.main, *self._elsewhere.values()]))

    def of(self, name: str) -> torch.device:
        """Return the device of a module of the base transformer, or of a tensor that is named after one."""
        if name not in self._devices:
            blocks = (block for block in self._elsewhere if name == block or name.startswith(f"{block}."))
            self._devices[name] = self._elsewhere.get(next(blocks, ""), self.main)
        return self._devices[name]

    @property
    def several(self) -> bool:
        """Whether some blocks are on another device than the rest."""
        return bool(self._elsewhere)

    def beside(self, tensors: Tensors) -> Tensors:
        """Return a part's tensors, each on the device of the module that it is named after; gradients flow back."""
        if not self._elsewhere:
            return tensors
        with torch.enable_grad():  # a tensor in training says so also in a pass without graph
            return {name: tensor.to(self.of(name)) for name, tensor in tensors.items()}

    def place(self, model: nn.Module, base: nn.Module) -> None:
        """Move a model's weights to their devices."""
        if not self._elsewhere:
            model.to(self.main)
            return
        names = {id(module): name for name, module in base.named_modules()}
        for module in model.modules():
            device = self.of(names.get(id(module), ""))
            cast(Any, module)._apply(lambda tensor, device=device: tensor.to(device), recurse=False)

    def move_at_borders(self, base: nn.Module, architecture: Architecture | None) -> None:
        """Hook blocks so that their inputs are moved to their devices, and the last block's states to the main one."""
        if not self._elsewhere or architecture is None:
            return
        for stack in architecture.stacks:
            blocks = cast(nn.ModuleList, base.get_submodule(stack.blocks))
            mover = _Mover()
            for number, block in enumerate(blocks):
                device = self.of(f"{stack.blocks}.{number}")
                block.register_forward_pre_hook(partial(mover.before, device), with_kwargs=True)
            blocks[-1].register_forward_hook(partial(mover.after, self.main))

    def for_loading(self, model: nn.Module) -> dict[str, torch.device]:
        """Return the argument `device_map` of `from_pretrained`; `model` has the same shapes as the model to load."""
        base = without_lm_head(model)
        names = {id(module): name for name, module in model.named_modules()}
        blocks = {names[id(base.get_submodule(block))]: device for block, device in self._elsewhere.items()}
        return dict(_spread(model, "", blocks, self.main))


class _Mover:
    """Moves the inputs of a stack's blocks; a tensor that several blocks of a device read is moved once a forward."""

    def __init__(self) -> None:
        self._moved: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        """(id of a tensor, device) → the tensor, held so that its id stays its own, and its copy."""

    def before(self, device: torch.device, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run before a block of this device, as its hook."""
        return self._to(device, args), self._to(device, kwargs)

    def after(self, main: torch.device, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Run after the stack's last block, as its hook."""
        self._moved.clear()
        output = self._to(main, output)
        self._moved.clear()
        return output

    def _to(self, device: torch.device, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device == device:
                return value
            key = (id(value), device)
            if key not in self._moved:
                self._moved[key] = value, value.to(device)
            return self._moved[key][1]
        if type(value) in (tuple, list):
            return type(value)(self._to(device, item) for item in value)
        return {key: self._to(device, item) for key, item in value.items()} if type(value) is dict else value


def _spread(
    module: nn.Module, prefix: str, blocks: Mapping[str, torch.device], main: torch.device
) -> Iterator[tuple[str, torch.device]]:
    """Yield the largest modules, and the tensors between them, that are on one device each."""
    for tensors in (module.named_parameters(prefix, recurse=False), module.named_buffers(prefix, recurse=False)):
        yield from ((name, main) for name, _ in tensors)
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if path not in blocks and any(block.startswith(f"{path}.") for block in blocks):
            yield from _spread(child, path, blocks, main)
        else:
            yield path, blocks.get(path, main)


class WeightPlacement:
    """Moves a model's weights to the device at once or at the first use, and back to rest.

    With `on_use`, weights stay where they are until `wake`, and `rest` takes them back, except weights spread over
    several devices. A model that `stays` is never moved.
    """

    def __init__(
        self,
        model: nn.Module,
        base: nn.Module,
        devices: BlockDevices,
        on_use: bool,
        stays: bool,
    ) -> None:
        self._model = model
        self._device = devices.main
        self._on_use = on_use and not stays and devices.main.type != "cpu" and len(devices.all) == 1
        self._resting = self._on_use
        self._host: list[Tensor] | None = None
        """The weights on the CPU, while they are on the device too."""
        if not stays and not self._on_use:
            devices.place(model, base)

    def wake(self) -> None:
        """Copy weights at rest to the device."""
        if self._resting:
            self._host = [tensor.data for tensor in self._tensors()]
            self._model.to(self._device)
            self._resting = False

    def rest(self) -> None:
        """Free the device's memory until `wake`, if weights are loaded `on_use`."""
        if self._on_use and self._host is not None:
            for tensor, host in zip(self._tensors(), self._host, strict=True):
                tensor.data = host
            self._resting, self._host = True, None

    def _tensors(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]


def candidates(main: torch.device) -> list[torch.device]:
    """Return the devices that `backbone.device_map=auto` can put weights on, the main one first."""
    if main.type != "cuda":
        return [main]
    own = torch.cuda.current_device() if main.index is None else main.index
    return [torch.device("cuda", index) for index in dict.fromkeys([own, *range(torch.cuda.device_count())])]


def plan_blocks(
    model: Any, devices: Sequence[torch.device], dtype: torch.dtype, quantization: str = NONE
) -> BlockDevices:
    """Decide which of several devices each block goes to; the first one is the main one.

    The model has shapes alone, `dtype` is the type of its loaded weights.
    """
    base, family = without_lm_head(model), model.config.model_type
    if family not in ARCHITECTURES:
        raise InputError(f"backbone.device_map: it is not known which modules of {family!r} are blocks; leave it out")
    lists = [stack.blocks for stack in ARCHITECTURES[family].stacks]
    blocks = {f"{name}.{index}": block for name in lists for index, block in enumerate(base.get_submodule(name))}
    return BlockDevices(devices[0], _balanced(model, blocks, devices, dtype, quantization))


def _balanced(
    model: Any, blocks: Mapping[str, nn.Module], devices: Sequence[torch.device], dtype: torch.dtype, quantization: str
) -> dict[str, torch.device]:
    """Spread blocks over devices in their order, about equally many bytes each, as accelerate plans it."""
    infer = require_accelerate().utils.infer_auto_device_map
    sizes = [dtype.itemsize * sum(tensor.numel() for tensor in block.parameters()) for block in blocks.values()]
    whole, memory = weight_bytes(model, NONE, dtype.itemsize), weight_bytes(model, quantization, dtype.itemsize)
    shrunk = max(1, memory - whole + sum(sizes)) / sum(sizes)  # of a quantized block's bytes
    room = {index: free_memory(device) for index, device in enumerate(devices)}
    room[0] -= whole - sum(sizes)  # embeddings and head
    room = {index: max(0, int(free / shrunk)) for index, free in room.items()}
    fair = -(-sum(sizes) // len(devices)) + max(sizes)
    stack, classes = nn.ModuleList(blocks.values()), list({type(block).__name__ for block in blocks.values()})
    for bounds in ({index: min(free, fair) for index, free in room.items()}, room):
        device_map = infer(stack, dict(bounds), classes, dtype=dtype, clean_result=False)
        if all(isinstance(device, int) for device in device_map.values()):
            return {name: devices[device_map[str(index)]] for index, name in enumerate(blocks)}
    raise InputError(
        f"backbone.device_map=auto: {len(blocks)} blocks of up to {max(sizes) * shrunk / GIB:.1f} GiB do not fit onto "
        f"{', '.join(map(str, devices))}; use backbone.quantization or a smaller backbone"
    )


def require_accelerate() -> Any:
    """Import accelerate, or say how to install it."""
    with needs("backbone.device_map: needs accelerate", "quantization"):
        import accelerate
    return accelerate


def release(model: nn.Module) -> None:
    """Remove accelerate's hooks from a model loaded onto several devices, because `BlockDevices` moves activations."""
    hooks = require_accelerate().hooks
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            hooks.remove_hook_from_module(module)
            module.__dict__.pop("forward", None)  # bound to this module also in copies of it
    for name in ("to", "cuda"):
        model.__dict__.pop(name, None)
