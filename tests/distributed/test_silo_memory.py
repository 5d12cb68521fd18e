"""A silo's own machine refuses steps that cannot fit there before training, as a run in one process does."""

from __future__ import annotations

import pytest

from silotune.distributed.protocol.agreement import wire_config
from silotune.distributed.silo.setup import SiloSetup
from silotune.errors import InputError
from silotune.runs.build import step_memory
from silotune.runs.build.resolve import on_this_machine
from tests.support.session_rig import local_configs


def test_a_row_longer_than_the_bound_is_refused(tiny_config, tmp_path):
    config = on_this_machine(tiny_config("fedavg", "train.tokens_at_once=4"))
    with pytest.raises(InputError, match=r"^train\.tokens_at_once=4: a row of \d+ tokens"):
        SiloSetup(local_configs(config, tmp_path)["alpha"]).federation_for(wire_config(config, ["alpha"]), None)


def test_a_step_that_cannot_fit_is_refused(tiny_config, tmp_path, monkeypatch):
    config = on_this_machine(tiny_config("fedavg"))
    monkeypatch.setattr(step_memory, "free_memory", lambda device: 0)
    with pytest.raises(InputError, match=r"^train: a batch of about \d+ tokens.* keeps at least"):
        SiloSetup(local_configs(config, tmp_path)["alpha"]).federation_for(wire_config(config, ["alpha"]), None)
