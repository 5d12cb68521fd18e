"""The configuration: every key with its type and default, presets, and how files and words become a `Config`."""

from __future__ import annotations

from silotune.config.backbone import BackboneConfig
from silotune.config.data import DataConfig, SiloConfig
from silotune.config.parse import (
    differences,
    dump,
    load_config,
    load_resolved,
    preset_names,
    preset_text,
    preset_tree,
    validated,
)
from silotune.config.schema import Config
from silotune.config.section import Choice, input_error
from silotune.config.train import TrainConfig

__all__ = [
    "BackboneConfig",
    "Choice",
    "Config",
    "DataConfig",
    "SiloConfig",
    "TrainConfig",
    "differences",
    "dump",
    "input_error",
    "load_config",
    "load_resolved",
    "preset_names",
    "preset_text",
    "preset_tree",
    "validated",
]
