"""`native_layout`: an adapter as `silotune_adapter.json` and tensors, for tuners that peft does not have.

docs/export.md describes it; `standalone.py` reads it without silotune.
"""

from __future__ import annotations

from typing import Any

from silotune.interop.peft_format import Layout
from silotune.models.tuners import Tuner
from silotune.models.tuners.base import MergedAdapter


def native_layout(tuner: Tuner, adapter: MergedAdapter, base: str, base_class: str, base_sha256: str) -> Layout | None:
    """Lay out one adapter in the layout of `silotune_adapter.json`, version 1.

    Args:
        tuner: the adapter's tuner.
        adapter: the adapter's tensors, named `<module>.<name>`; modules are named inside the base transformer
            (`model.base_model`).
        base: the base model's name.
        base_class: the class of transformers that loads the base model.
        base_sha256: of the base model's weights.

    Returns:
        None if the tuner has no such layout.
    """
    own_fields = tuner.native_config(adapter)
    if own_fields is None:
        return None
    config: dict[str, Any] = {
        "format": "silotune-adapter",
        "version": 1,
        "kind": tuner.name,
        "base_model": base,
        "base_class": base_class,
        "base_sha256": base_sha256,
        "computes": own_fields["computes"],
        "modules": tuner.target_modules(adapter.tensors),
    }
    return Layout(config | own_fields, adapter.tensors, "silotune", "silotune_adapter", "silotune_adapter")
