"""What an operator reads of a run: every key that is off its default, in groups, in words."""

from __future__ import annotations

from silotune.config.trees import flat
from silotune.distributed.silo.approvals import Approvals
from silotune.distributed.silo.changed_settings import changed_settings
from tests.support.malicious import Malicious
from tests.support.session_rig import local_configs

SILOS = "federation.silos=[alpha,beta,gamma]"

CHANGES = {
    "train__schedule": "linear",
    "train__keep_optimizer": True,
    "train__dropout": 0.1,
    "train__label_smoothing": 0.2,
    "train__clip_norm": 1.5,
    "train__adam_epsilon": 1e-6,
}


def test_every_key_off_its_default_is_shown_before_a_decision(tiny_config, tmp_path):
    config = tiny_config("fedavg", "tuner=lora", "tuner.r=3")
    local = local_configs(config, tmp_path / "silo", approval="ask")["alpha"]
    coordinator = Malicious(local, config, changes=CHANGES)
    assert coordinator.ask("hello").kind == "waiting"
    (request,) = Approvals(coordinator.session._setup.limits.ledger.folder).all()
    text = "\n".join(request.description)
    for key, value in CHANGES.items():
        assert f"\n  {key.replace('__', '.')} = {value} (default " in text
    assert "  train.schedule = linear (default constant): how the learning rate falls" in text
    assert "  tuner.r = 3 (default 8): the rank" in text
    assert text.index("method, tuner and head:") < text.index("settings of training:") < text.index("train.schedule")


def test_none_are_left_out_but_what_the_coordinator_waits_for(tiny_config):
    config = tiny_config("fedprox", "method.mu=0.5", "uplink=clip", "uplink.clip=1", "evaluation.bootstrap=7", SILOS)
    plain = tiny_config("fedprox", "method.mu=0.5", SILOS)
    shown = {line.split(" = ")[0].strip() for line in changed_settings(config) if " = " in line}
    assert {"method.name", "method.mu", "uplink.name", "uplink.clip", "evaluation.bootstrap"} <= shown
    before, now = dict(flat(plain.model_dump(mode="json"))), dict(flat(config.model_dump(mode="json")))
    differing = {key for key in {*before, *now} if before.get(key) != now.get(key)}
    assert differing <= shown
    assert not any(key.startswith("federation") for key in shown)


def test_a_long_value_is_cut(tiny_config):
    config = tiny_config("fedavg", f"description={'x' * 500}", SILOS)
    (line,) = [line for line in changed_settings(config) if "xxx" in line]
    assert "… (500 characters)" in line
    assert len(line) < 300
