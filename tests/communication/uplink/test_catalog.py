"""A codec in the built-in list is known to the configuration without a second place, with its options."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from dataclasses import dataclass

from pydantic import BaseModel, Field

import silotune.communication.uplink as catalog
from silotune.communication.uplink.codecs import Float16


class Options(BaseModel):
    share: float = Field(0.1, gt=0, le=1)


class Sparse(Float16):
    def __init__(self, options):
        object.__setattr__(self, "share", options.share)


Sparse.Options = Options
catalog.BUILT_IN_CODECS["sparse"] = Sparse

from silotune.communication.uplink import make_pipeline
from silotune.config.registries import CODECS
from silotune.config.uplink import UplinkConfig

made = make_pipeline(UplinkConfig(name="clip,sparse", share=0.25))
assert type(made.codec) is Sparse and made.codec.share == 0.25
assert made.codec_key == "sparse {'share': 0.25}"
assert UplinkConfig(name="sparse").options == {"share": 0.1}
assert CODECS.names[:3] == ["fp16", "int8", "int4"] and "sparse" in CODECS.names, CODECS.names
for wrong, line in [
    ({"name": "int8", "share": 0.1}, "share belongs to uplink=sparse, not to uplink=int8; leave uplink.share"),
    ({"name": "clip", "share": 0.1}, "share belongs to uplink=sparse, not to uplink=none; leave uplink.share"),
    ({"name": "sparse", "share": 2}, "uplink.share: must be less than or equal to 1"),
    ({"name": "sparse", "rounding": "nearest"}, "rounding belongs to uplink=int8 or uplink=int4"),
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

assert "int8" in CODECS.reserved and "krum" in AGGREGATIONS.reserved and "mlp" in HEADS.reserved
rooms = {"silotune.communication.uplink", "silotune.aggregation", "silotune.models.heads"}
assert not rooms & sys.modules.keys()
assert {"fp16", "int8", "int4"} <= set(CODECS)
assert {"uniform", "samples", "median"} <= set(AGGREGATIONS)
assert {"mlp", "linear", "verbalizer", "lm"} <= set(HEADS)
"""


IN_TURN = """
import os, sys, traceback
import torch, transformers  # every program needs them; nothing of silotune is imported here

ends = []
for program in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(*ends)
"""
"""Each program runs in a fork of its own: what one imports, the next has not."""


def test_an_added_codec_is_known_and_the_configuration_alone_finds_the_built_in_choices_when_they_are_needed() -> None:
    words = [sys.executable, "-c", IN_TURN, PROGRAM, CONFIG_ALONE]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", "0"], done.stderr
