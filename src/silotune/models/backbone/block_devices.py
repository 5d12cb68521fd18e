"""`BlockDevices`: on which device each block is, and how what it reads gets there; `WeightPlacement` moves weights.

Blocks alone are spread. Embeddings, final norm and language-model head are on the main device, where parts of a model,
inputs and readings are too; a block's part of a tuner is copied beside the block for each forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from silotune.core.tensors import Tensors
from silotune.models.backbone.architectures import Architecture
from silotune.models.backbone.lm_head import without_lm_head
from silotune.models.backbone.quantization import NONE
from silotune.models.backbone.shared_weights import SharedWeights


class BlockDevices:
    """The devices of a backbone's blocks.

    Args:
        main: the device of everything that is no block.
        devices: block's name in the base transformer → its device; blocks without an entry are on the main one.
    """

    def __init__(self, main: torch.device, devices: Mapping[str, torch.device] | None = None) -> None:
        self.main = main
        self._elsewhere = {name: device for name, device in (devices or {}).items() if device != main}
        self._found: dict[str, torch.device] = {}

    @property
    def all(self) -> list[torch.device]:
        """The devices in use, the main one first."""
        return list(dict.fromkeys([self.main, *self._elsewhere.values()]))

    def of(self, name: str) -> torch.device:
        """Return the device of a module of the base transformer, or of a tensor that is named after one."""
        if name not in self._found:
            blocks = (block for block in self._elsewhere if name == block or name.startswith(f"{block}."))
            self._found[name] = self._elsewhere.get(next(blocks, ""), self.main)
        return self._found[name]

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
        """Hook blocks, so that what they are given follows them to their devices, and the last one's states return."""
        if not self._elsewhere or architecture is None:
            return
        for stack in architecture.stacks:
            blocks = cast(nn.ModuleList, base.get_submodule(stack.blocks))
            mover = _Mover()
            for number, block in enumerate(blocks):
                block.register_forward_pre_hook(mover.before(self.of(f"{stack.blocks}.{number}")), with_kwargs=True)
            blocks[-1].register_forward_hook(mover.after(self.main))

    def for_loading(self, model: nn.Module) -> dict[str, torch.device]:
        """Return the argument `device_map` of `from_pretrained`: every module or tensor of a model → its device.

        Args:
            model: the model without data; the names of its modules are those of the loaded one.
        """
        base = without_lm_head(model)
        names = {id(module): name for name, module in model.named_modules()}
        blocks = {names[id(base.get_submodule(block))]: device for block, device in self._elsewhere.items()}
        return dict(_spread(model, "", blocks, self.main))


class _Mover:
    """Moves what the blocks of a stack are given; what all blocks on a device read is moved there once a forward."""

    def __init__(self) -> None:
        self._moved: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        """(id of a tensor, device) → the tensor, held so that its id stays its own, and its copy."""

    def before(self, device: torch.device) -> Any:
        """A hook that runs before a block of this device."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return self._to(device, args), self._to(device, kwargs)

        return hook

    def after(self, main: torch.device) -> Any:
        """A hook that runs after the stack's last block."""

        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            self._moved.clear()
            output = self._to(main, output)
            self._moved.clear()
            return output

        return hook

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
    """Moves a model's weights to the device at once or at the first use, back to rest, and into shared memory.

    Args:
        model: the whole model.
        base: its base transformer.
        devices: where it runs.
        quantization: how its linear layers are stored; a quantized model is on its device already and stays there.
        on_use: leave the weights where they are until `wake`, and let `rest` take them back; not where they are spread
            over several devices.
        shape_only: the model has shapes but no data, and stays where it is.
    """

    def __init__(
        self,
        model: nn.Module,
        base: nn.Module,
        devices: BlockDevices,
        quantization: str,
        on_use: bool,
        shape_only: bool,
    ) -> None:
        self._model = model
        self._device = devices.main
        self._quantized = quantization != NONE
        may_rest = devices.main.type != "cpu" and len(devices.all) == 1 and not self._quantized
        self._on_use = on_use and may_rest
        self._resting = self._on_use
        self._host: list[Tensor] | None = None
        """The weights on the CPU, while they are on the device too."""
        self._shared: SharedWeights | None = None
        if not shape_only and not self._on_use and not self._quantized:
            devices.place(model, base)

    def wake(self) -> None:
        """Copy weights at rest to the device."""
        if self._resting:
            self._host = [tensor.data for tensor in self._tensors()]
            self._model.to(self._device)
            self._resting = False

    def rest(self) -> None:
        """Free the device's memory until `wake`; nothing happens without `on_use`."""
        if self._on_use and self._host is not None:
            for tensor, host in zip(self._tensors(), self._host, strict=True):
                tensor.data = host
            self._resting, self._host = True, None

    def share(self) -> SharedWeights | None:
        """Put the weights where other processes of this machine can use them.

        Returns:
            What another process loads the backbone with; None if it shares the files, if they are on a device, or if
            they are quantized (every process then quantizes its own, which are small).
        """
        if self._quantized:
            return None
        self.rest()
        if self._shared is None and {tensor.device.type for tensor in self._tensors()} == {"cpu"}:
            self._shared = SharedWeights.of(self._model)
        return self._shared

    def _tensors(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]
