"""A silo's own machine refuses rows that `train.tokens_at_once` has no room for, as a run in one process does."""

from __future__ import annotations

import pytest

from silotune.distributed.protocol.agreement import wire_config
from silotune.distributed.silo.setup import SiloSetup
from silotune.errors import InputError
from silotune.runs.build.resolve import on_this_machine
from tests.support.session_rig import local_configs


def test_a_row_longer_than_the_bound_is_refused(tiny_config, tmp_path):
    config = on_this_machine(tiny_config("fedavg", "train.tokens_at_once=4"))
    with pytest.raises(InputError, match=r"^train\.tokens_at_once=4: a row of \d+ tokens"):
        SiloSetup(local_configs(config, tmp_path)["alpha"]).prepare(wire_config(config, ["alpha"]), None)
