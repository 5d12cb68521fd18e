"""Settings for equal bits in a silo's worker and in the coordinator; a refused operation is told with the key."""

from __future__ import annotations

import os

import pytest
import torch

from silotune.core.determinism import set_numerics
from silotune.core.records import Records
from silotune.distributed.coordinator import coordinate as coordinator
from silotune.distributed.coordinator.run_status import RunStatus
from silotune.distributed.protocol.frames import Frame, decode
from silotune.distributed.protocol.handshake import wire_config
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.setup import SiloSetup
from silotune.errors import InputError
from silotune.models.forward.view_program import ViewProgram
from silotune.runs.build.model import BackboneRequirements
from silotune.runs.build.resolve import resolve
from silotune.runs.run import run
from tests.support.session_rig import DirectLink, job, local_configs


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    """The process's settings are the user's again after each test."""
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.delenv(variable, raising=False)
    undo = set_numerics(deterministic=True, tf32=False)
    torch.set_deterministic_debug_mode("default")
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        del os.environ[variable]
    yield
    undo()


def state() -> tuple[int, str | None]:
    return torch.get_deterministic_debug_mode(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture
def at_loading(monkeypatch):
    """The settings that were in effect when a backbone was to be loaded; it is refused then, as "seen"."""
    found = []

    def load(_requirements):
        found.append(state())
        raise InputError("seen")

    monkeypatch.setattr(BackboneRequirements, "load", load)
    return found


@pytest.mark.parametrize(("word", "expected"), [("true", (2, ":4096:8")), ("false", (0, None))])
def test_a_silos_worker_sets_them_before_it_loads_the_backbone(tiny_config, tmp_path, at_loading, word, expected):
    config = resolve(tiny_config("fedavg", f"precision.deterministic={word}")).config
    settings = local_configs(config, tmp_path)["alpha"]
    with pytest.raises(InputError, match="seen"):
        SiloSetup(settings).prepare(wire_config(config, ["alpha"]), None)
    assert at_loading == [expected]


def test_so_does_the_coordinator(tiny_config, tmp_path, at_loading):
    config = resolve(tiny_config("fedavg")).config
    with pytest.raises(InputError, match="seen"):
        coordinator.run_job(
            job(config, tmp_path, ["alpha"]), DirectLink({}), Records(tmp_path), RunStatus(), BackboneRequirements.load
        )
    assert at_loading == [(2, ":4096:8")]


def test_a_refused_operation_ends_a_run_with_the_key(tiny_config, tmp_path, monkeypatch):
    """Losses contain an operation that has no deterministic implementation."""

    def views(self, *args, **kwargs):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))

    monkeypatch.setattr(ViewProgram, "run", views)
    with pytest.raises(InputError, match=r"precision\.deterministic: put_"):
        run(tiny_config("fedavg"), out=tmp_path / "run")
    assert state() == (0, None)


def test_and_a_silo_says_it_to_its_coordinator(tiny_config, tmp_path, monkeypatch):
    settings = local_configs(resolve(tiny_config("fedavg")).config, tmp_path)["alpha"]
    torch.set_deterministic_debug_mode("error")
    monkeypatch.setattr(Session, "_answer", lambda *_: torch.zeros(3).put_(torch.tensor([0]), torch.ones(1)))
    reply = decode(Session(settings).answer(Frame("round").encode()))
    assert reply.kind == "failed"
    assert "precision.deterministic: put_ has no deterministic implementation" in reply.fields["reason"]
