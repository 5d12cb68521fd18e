"""Bottleneck adapters and bias offsets, for which peft has no kind: a safetensors layout of our own.

`silotune_adapter.json` and `silotune_adapter.safetensors`; what they mean is in docs/export.md, and
`silotune.interop.standalone` reads them without anything else of silotune.
"""

from __future__ import annotations

from typing import Any

from silotune.interop.merge_adapters import MergedAdapter
from silotune.interop.peft_format import Layout

KINDS = ("bottleneck", "bitfit")

_COMPUTES = {
    "bottleneck": "y + up.weight · gelu(down.weight · y + down.bias) + up.bias, where y is the module's output",
    "bitfit": "y + bias, where y is the module's output (so the pretrained bias moves by `bias`)",
}


def own_layout(kind: str, adapter: MergedAdapter, base: str, base_class: str, base_sha256: str) -> Layout:
    """One adapter in the layout of `silotune_adapter.json`, version 1.

    Tensors are `<module>.down.weight` (r, hidden), `<module>.down.bias` (r,), `<module>.up.weight` (hidden, r) and
    `<module>.up.bias` (hidden,); or `<module>.bias` (out,). Modules are named inside the base transformer
    (`model.base_model`).
    """
    endings = (".down.weight", ".down.bias", ".up.weight", ".up.bias") if kind == "bottleneck" else (".bias",)
    modules = list(dict.fromkeys(_without(name, endings) for name in adapter.tensors))
    config: dict[str, Any] = {
        "format": "silotune-adapter",
        "version": 1,
        "kind": kind,
        "base_model": base,
        "base_class": base_class,
        "base_sha256": base_sha256,
        "computes": _COMPUTES[kind],
        "modules": modules,
    }
    if kind == "bottleneck":
        config |= {"r": len(adapter.tensors[f"{modules[0]}.down.bias"]), "activation": "gelu"}
    return config, adapter.tensors


def _without(name: str, endings: tuple[str, ...]) -> str:
    return next(name.removesuffix(ending) for ending in endings if name.endswith(ending))
