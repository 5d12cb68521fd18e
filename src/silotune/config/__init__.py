"""Configuration: schema, presets and parsing."""

from silotune.config.parse import dump, input_error, load_config, preset_names, preset_text, validated
from silotune.config.schema import Choice, Config, DataConfig, SiloConfig, TrainConfig

__all__ = [
    "Choice",
    "Config",
    "DataConfig",
    "SiloConfig",
    "TrainConfig",
    "dump",
    "input_error",
    "load_config",
    "preset_names",
    "preset_text",
    "validated",
]
