"""A codec in the built-in list is known to the configuration without a second place, with its options."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from dataclasses import dataclass

from pydantic import BaseModel, Field

import silotune.communication.uplink.catalog as catalog
from silotune.communication.uplink.codecs import Float16


class Options(BaseModel):
    fraction: float = Field(0.1, gt=0, le=1)


class TopK(Float16):
    def __init__(self, options):
        object.__setattr__(self, "fraction", options.fraction)


TopK.Options = Options
catalog.BUILT_IN_CODECS["topk"] = TopK

from silotune.communication.uplink import make_pipeline
from silotune.config.uplink import CODEC_NAMES, UplinkConfig

made = make_pipeline(UplinkConfig(name="clip,topk", fraction=0.25))
assert type(made.codec) is TopK and made.codec.fraction == 0.25
assert made.codec_key == "topk {'fraction': 0.25}"
assert UplinkConfig(name="topk").options == {"fraction": 0.1}
assert list(CODEC_NAMES)[:4] == ["fp16", "int8", "int4", "topk"], list(CODEC_NAMES)
for wrong, line in [
    ({"name": "int8", "fraction": 0.1}, "fraction belongs to uplink=topk, not to uplink=int8; leave uplink.fraction"),
    ({"name": "clip", "fraction": 0.1}, "fraction belongs to uplink=topk, not to uplink=none; leave uplink.fraction"),
    ({"name": "topk", "fraction": 2}, "uplink.fraction: must be less than or equal to 1"),
    ({"name": "topk", "rounding": "nearest"}, "rounding belongs to uplink=int8 or uplink=int4"),
]:
    try:
        UplinkConfig(**wrong)
    except Exception as error:
        assert line in str(error), str(error)
    else:
        raise AssertionError(wrong)
"""

CONFIG_ALONE = """
import sys

from silotune.config.registries import AGGREGATIONS, CODECS, HEADS

assert "int8" in CODECS.names and "krum" in AGGREGATIONS.names and "mlp" in HEADS.names
rooms = {"silotune.communication.uplink", "silotune.communication.aggregation", "silotune.models.heads"}
assert not rooms & sys.modules.keys()
assert {"fp16", "int8", "int4"} <= set(CODECS)
assert {"uniform", "samples", "median"} <= set(AGGREGATIONS)
assert {"mlp", "linear", "verbalizer", "lm"} <= set(HEADS)
"""


def passes(program: str) -> None:
    """Run a program in a new process."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_added_codec_is_known_with_its_options() -> None:
    passes(PROGRAM)


def test_the_configuration_alone_finds_the_built_in_choices_when_they_are_needed() -> None:
    passes(CONFIG_ALONE)
