"""Silos of several LoRA ranks over messages: by the run's configuration, and by a bound in a silo's own file."""

from __future__ import annotations

import pytest

from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.run_description import describe
from silotune.distributed.silo.session import Session
from silotune.errors import InputError, SilotuneError
from silotune.runs.storage.readers import events, read_summary
from tests.support.method_cases import logged
from tests.support.processes import bits
from tests.support.session_rig import DirectLink, coordinated, job, local_configs

SETTING = ("rounds=2", "train.steps=1", "tuner=lora", "tuner.r=5")
PATIENT = ("federation.patience=0.05", "federation.deadline=0.3", "federation.retries=0")


def bounded(configs, silo, rank):
    """Settings in which one silo's operator bounds its rank."""
    return configs | {silo: configs[silo].model_copy(update={"rank": rank})}


def test_a_bound_in_the_silos_own_file_is_its_rank(tiny_config, whole, tmp_path):
    """The run of the coordinator has one rank; beta says at the handshake that its own is at most 2."""
    config = tiny_config("hetlora", *SETTING)
    _, expected = whole("hetlora", *SETTING, "tuner.ranks.beta=2")
    configs = bounded(local_configs(config, tmp_path / "run"), "beta", 2)
    sessions = {name: Session(settings) for name, settings in configs.items()}
    coordinate(job(config, tmp_path / "run", configs), DirectLink(dict(enumerate(s.answer for s in sessions.values()))))
    assert bits(read_summary(tmp_path / "run")) == bits(expected)
    sizes = {event["silo"]: (event["bytes_down"], event["bytes_up"]) for event in logged(tmp_path / "run", "silo")}
    assert all(own < other for own, other in zip(sizes["beta"], sizes["alpha"], strict=True))
    told = {
        name: describe(s._setup.prepared.config, s._setup.prepared.federation, s.settings)
        for name, s in sessions.items()
    }
    assert "LoRA's rank: 2 here, 5 in the run" in told["beta"]
    assert not any("rank:" in line for line in told["alpha"])


@pytest.mark.long
def test_a_bound_above_the_runs_rank_changes_nothing(tiny_config, tmp_path):
    config = tiny_config("fedavg", *SETTING)
    configs = bounded(local_configs(config, tmp_path / "run"), "beta", 64)
    link = coordinated(config, tmp_path / "run", configs)
    assert not any("rank" in frame.fields for _, data in link.came if (frame := decode(data)).kind == "hello")


def test_an_aggregation_of_equal_ranks_refuses_before_round_1(tiny_config, tmp_path):
    config = tiny_config("fedavg", *SETTING, *PATIENT)
    configs = bounded(local_configs(config, tmp_path / "run"), "beta", 2)
    with pytest.raises(
        InputError, match=r"silo 'beta' has a rank of its own \(2\).*allowed: aggregation=flexlora, hetlora"
    ):
        coordinated(config, tmp_path / "run", configs)
    assert not (tmp_path / "run" / "events.jsonl").exists()


@pytest.mark.long
def test_a_rank_that_changes_within_a_run_is_refused_and_named(tiny_config, tmp_path):
    config, out = tiny_config("hetlora", *SETTING, *PATIENT, "federation.away=0.2"), tmp_path / "run"
    configs = bounded(local_configs(config, tmp_path / "silos"), "beta", 2)
    coordinated(config, out, configs, local=False)
    before = list(events(out))
    changed = bounded(configs, "beta", 3)
    with pytest.raises(SilotuneError, match=r"its LoRA rank is 3, and was 2 when the run began"):
        coordinated(config, out, changed, local=False)
    assert list(events(out)) == before
