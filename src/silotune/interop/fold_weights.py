"""An adapter folded into the backbone's weights: a model that transformers loads alone, in float32."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from silotune.errors import InputError
from silotune.interop.merge_adapters import MergedAdapter
from silotune.models.backbone.loading import default_backbone
from silotune.models.tuners.target_modules import is_transposed


def load_plain(source: str, base_class: str) -> Any:
    """The backbone as transformers loads it, whole (poolers too) and in float32.

    Raises:
        InputError: its weights are gone since the run was opened.
    """
    import transformers

    name = default_backbone() if source == "default" else source
    try:
        model, found = getattr(transformers, base_class).from_pretrained(
            name,
            dtype=torch.float32,
            use_safetensors=True,  # nothing is unpickled
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise InputError(f"backbone: cannot load {source!r} ({str(error).strip().splitlines()[0]})") from error
    if any(key.startswith("pooler.") for key in found["missing_keys"]):
        model.base_model.pooler = None  # it was never there, and would be random
    return model.eval()


@torch.no_grad()
def fold_in(model: Any, kind: str, adapter: MergedAdapter) -> None:
    """Change the model's weights in place so that it computes what it computed with the adapter.

    Args:
        model: the plain backbone, float32.
        kind: the tuner's name, of `silotune.interop.joined.Linear`.
        adapter: its tensors and options.
    """
    base = model.base_model
    if kind == "full":
        weights = dict(base.named_parameters())
        for name, tensor in adapter.tensors.items():
            weights[name].copy_(tensor)
        return
    for name, tensor in adapter.tensors.items():
        if kind == "lora" and name.endswith(".lora_A.weight"):
            module = base.get_submodule(site := name.removesuffix(".lora_A.weight"))
            delta = adapter.tensors[f"{site}.lora_B.weight"].double() @ tensor.double()
            delta = delta * (adapter.options["alpha"] / adapter.options["r"])
            _set(module, _rows_out(module).double() + delta)
        elif kind == "ia3":
            _scale(base.get_submodule(name.removesuffix(".ia3_l")), tensor)
        elif kind == "bitfit":
            bias = base.get_submodule(name.removesuffix(".bias")).bias
            bias.copy_((bias.double() + tensor.double()).float())
        elif kind != "lora":
            raise InputError(f"export: tuner={kind} cannot be folded into weights")


def _scale(module: nn.Module, factor: Tensor) -> None:
    """(out, 1) scales what comes out, the bias too; (1, in) scales what goes in."""
    weight = _rows_out(module)
    _set(module, weight * factor)
    bias = cast("Tensor | None", module.bias)
    if factor.shape[0] != 1 and bias is not None:
        bias.mul_(factor.flatten())


def _rows_out(module: nn.Module) -> Tensor:
    """A linear layer's weight as (out, in), also where it is kept the other way round."""
    weight = cast(Tensor, module.weight)
    return weight.t() if is_transposed(module) else weight


def _set(module: nn.Module, weight: Tensor) -> None:
    cast(Tensor, module.weight).copy_((weight.t() if is_transposed(module) else weight).float())
