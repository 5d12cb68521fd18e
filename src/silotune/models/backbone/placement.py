"""`WeightPlacement`: moves weights to the device, to rest on the CPU, or into memory that children inherit."""

from __future__ import annotations

from torch import Tensor, nn

from silotune.models.backbone.block_devices import BlockDevices
from silotune.models.backbone.quantization import NONE
from silotune.models.backbone.shared_weights import SharedWeights


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

    @property
    def resting_bytes(self) -> int:
        """The bytes that the weights will take on the device, and do not take yet."""
        return sum(tensor.nbytes for tensor in self._tensors()) if self._resting else 0

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
