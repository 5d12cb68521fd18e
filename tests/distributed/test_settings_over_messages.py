"""Ranks, recipes and rows with numbers are over messages what they are in one process."""

from __future__ import annotations

import json

import pytest

from silotune import run
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.run_description import describe
from silotune.distributed.silo.session import Session
from silotune.errors import InputError, SilotuneError
from silotune.runs.build.resolve import read_config
from silotune.runs.storage.readers import events, read_summary
from silotune.training.phase_optimizer import KEPT
from tests.support.method_cases import logged
from tests.support.processes import bits
from tests.support.session_rig import DirectLink, coordinated, federate, job, local_configs

SETTING = ("rounds=2", "train.steps=1", "tuner=lora", "tuner.r=5")
PATIENT = ("federation.patience=0.05", "federation.deadline=0.2", "federation.retries=0")


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


RECIPE = (
    *("train.optimizer=adamw", "train.schedule=linear", "train.schedule_over=run", "train.warmup=2"),
    *("train.weight_decay=0.1", "train.clip_norm=1", "train.dropout=own", "train.keep_optimizer=true"),
    *("train.label_smoothing=0.1", "train.class_weights=balanced"),
)


@pytest.mark.long
def test_a_whole_recipe(whole, tmp_path):
    config, expected = whole("fedmcp", "tuner.r=2", *RECIPE, "rounds=2", "train.steps=3")
    found, _ = federate(config, tmp_path / "run")
    assert found["shared_sha256"] == expected["shared_sha256"]
    assert found["silos"] == expected["silos"]
    for path in (tmp_path / "run").rglob("*.safetensors"):
        kept = KEPT.encode() in path.read_bytes()
        assert kept == path.stem.isdigit(), path  # in the states of silos: not with the coordinator, not in models


@pytest.mark.long
def test_early_stopping(tiny_config, in_one_process, tmp_path):
    """The coordinator judges each round at once, so that no round more is trained than in one process."""
    steps = ("rounds=6", "train.steps=1", "train.lr=1e-6", "train.early_stopping=2")  # nothing improves
    words = ("fedmcp", "tuner.r=2", *steps)
    found, _ = federate(tiny_config(*words), tmp_path / "run")
    alone = in_one_process(*words)
    assert found["stopped_after"] == alone.summary["stopped_after"] == 3
    assert found["shared_sha256"] == alone.summary["shared_sha256"]
    rounds = [[event["round"] for event in logged(folder, "round")] for folder in (tmp_path / "run", alone.folder)]
    assert rounds == [[1, 2, 3]] * 2


DISTINCT = 7.12345
"""A number of every row that is told by its digits."""


def test_silos_whose_rows_have_numbers_train_as_in_one_process_and_keep_them(tmp_path, backbone_folder):
    for silo in ("a", "b"):
        (tmp_path / "data" / silo).mkdir(parents=True)
        (tmp_path / "data" / silo / "meta.json").write_text('{"kind": "regression", "metric": "mse"}', encoding="utf-8")
        rows = [{"sentence1": f"the garden was warm {n}", "label": DISTINCT + n % 3} for n in range(20)]
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / "data" / silo / "train.jsonl").write_text(text, encoding="utf-8")
    data = [f"data.path={tmp_path / 'data'}", "data.tasks=[a,b]", "data.merge=true", "precision=fp32", "threads=1"]
    train = ["rounds=1", "train.steps=2", "train.batch_size=4", f"backbone={backbone_folder('bert')}"]
    setting = ["method=fedavg", "head=mlp", "tuner=lora", *data, *train]
    summary, link = federate(read_config("", setting), tmp_path / "sessions", order=(0, 1))
    alone = run("", *setting, out=tmp_path / "alone").summary
    assert summary["shared_sha256"] == alone["shared_sha256"]
    for silo in ("a", "b"):
        assert summary["silos"][silo]["test"] == pytest.approx(alone["silos"][silo]["test"])
        assert summary["tasks"][silo]["kind"] == "regression"
    frames = b"".join(data for _, data in (*link.sent, *link.came))
    assert b"regression" in frames  # the handshake names the kind
    assert str(DISTINCT).encode() not in frames
