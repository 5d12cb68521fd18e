"""LoRA ranks per silo in one process: keys and refusals, bytes, cohorts, uplinks, and what finished runs give."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from silotune.communication.messages import message_numbers
from silotune.core.tensors import digest, flatten
from silotune.errors import InputError
from silotune.evaluation.federation_scores import current_model_state
from silotune.interop.export import export
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import make_method, read_config
from silotune.runs.build.validation import check_start
from silotune.runs.personal_model import load_model
from silotune.runs.run import run
from silotune.runs.run_result import load_run
from tests.support.method_cases import logged, tapped

QUICK = ("tuner=lora", "tuner.r=4", "rounds=2", "train.steps=1")
MIXED = (*QUICK, "tuner.ranks.beta=1")


@pytest.fixture
def own_silos(tmp_path):
    """A file of two own silos, of which one has an entry's rank."""
    for name in ("north", "south"):
        lines = "".join(f"text {number},{number % 2}\n" for number in range(20))
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{lines}", encoding="utf-8")
    silos = [{"name": name, "path": f"{name}.csv", "task": "t"} for name in ("north", "south")]
    silos[0]["rank"] = 2
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"method": "hetlora", "silos": silos}), encoding="utf-8")
    return str(path)


def test_the_rank_of_an_entry_is_gathered_in_tuner_ranks(own_silos):
    config = read_config(own_silos, ["tuner.ranks.south=3"])
    assert config.tuner.options["ranks"] == {"north": 2, "south": 3}
    assert [silo.rank for silo in config.silos] == [None, None]
    assert read_config(own_silos, ["silos.north.rank=5"]).tuner.options["ranks"] == {"north": 5}
    assert read_config(own_silos, ["silos.north.rank=null"]).tuner.options["ranks"] == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tuner.ranks.beta=9"], "tuner.*ranks: 9 of silo 'beta'; allowed: 1 to 4"),
        (["tuner.ranks.beta=0"], "tuner.*ranks: 0 of silo 'beta'; allowed: 1 to 4"),
        (["tuner.ranks.delta=2"], "unknown silo in tuner.ranks 'delta'"),
        (
            ["tuner.ranks.beta=2", "method=fedavg"],
            "silo 'beta' has a rank of its own .2.*aggregation=flexlora, hetlora",
        ),
        (["tuner.ranks.beta=2", "method=ffa-lora", "aggregation=hetlora"], "hold no pairs of LoRA's A and B"),
        (["tuner.ranks.beta=2", "method=centralised"], "method centralised trains one adapter on all silos' rows"),
        (["tuner.ranks.beta=2", "tuner=bottleneck", "method=fedavg"], "ranks"),
        (["method.penalty=0.1"], "penalty: of the ranks that method.prune would take away"),
        (["method.prune=0.5", "method.adapters=2"], "prune: cuts the rank of one LoRA; allowed: method.adapters=1"),
        (["method.prune=1"], "method.prune"),
    ],
)
def test_what_cannot_be_is_one_line(words, message, tiny_config):
    with pytest.raises(InputError, match=message) as refused:
        build(tiny_config("hetlora", *QUICK, *words))
    assert "\n" not in str(refused.value)


def test_an_entrys_rank_of_a_tuner_without_ranks(own_silos):
    with pytest.raises(InputError, match=r"silos.north.rank: tuner=bottleneck has no rank; allowed: .*lora"):
        read_config(own_silos, ["method=fedmcp", "tuner=bottleneck"])


def test_local_silos_train_at_their_own_ranks(tiny_config):
    federation = build(tiny_config("local", *MIXED))
    for name, rank in {"alpha": 4, "beta": 1}.items():
        private = federation.context.state_of(federation.silos[name]).private
        adapters = [t for n, t in flatten(private).items() if n.endswith("lora_A.weight")]
        assert {len(tensor) for tensor in adapters} == {rank}


@pytest.mark.parametrize(
    "uplink",
    [
        (),
        pytest.param(("uplink=int8",), marks=pytest.mark.long),
        ("uplink=topk", "uplink.fraction=0.25"),
        pytest.param(
            ("uplink=clip,gaussian", "uplink.clip=1", "uplink.epsilon=8", "uplink.delta=1e-5"), marks=pytest.mark.long
        ),
    ],
)
def test_bytes_follow_the_rank(uplink, tiny_config, tmp_path):
    """Four times the rank, four times the numbers of the adapter, each way; events and messages say the same."""
    with tapped() as wire:
        made = run(tiny_config("hetlora", *MIXED, *uplink), out=tmp_path / "run")
    events = {(event["round"], event["silo"]): event for event in logged(tmp_path / "run", "silo")}
    for number in (1, 2):
        updates = wire.updates(number)
        assert {silo: len(message) for silo, message in updates.items()} == {
            silo: events[number, silo]["bytes_up"] for silo in updates
        }
        sizes = {silo: message_numbers(message) for silo, message in updates.items()}
        if not uplink or "gaussian" in uplink[0]:
            assert sizes["alpha"] == 4 * sizes["beta"]
        assert len(updates["beta"]) < len(updates["alpha"])
        down = {silo: events[number, silo]["bytes_down"] for silo in updates}
        assert down["alpha"] == down["gamma"] > 2 * down["beta"]
    assert made.summary["bytes_down"] == sum(event["bytes_down"] for event in events.values())


def test_silos_of_one_rank_get_the_same_bytes(tiny_federation):
    coordinator = tiny_federation("hetlora", *MIXED).coordinator
    assert coordinator.broadcast(1, "alpha") is coordinator.broadcast(1, "gamma") is coordinator.broadcast(1)
    assert coordinator.shared_of("alpha") is coordinator.shared
    assert coordinator.broadcast(1, "beta") is coordinator.broadcast(1, "beta")
    assert coordinator.broadcast(1, "beta") != coordinator.broadcast(1)


@pytest.mark.long
def test_a_cohort_holds_silos_of_one_rank(tiny_config, tmp_path):
    """Alone and together silos end in the same parts, up to the rounding of products of other shapes."""
    states = {}
    for cohort in (1, 3):
        made = run(tiny_config("hetlora", *MIXED, f"cohort={cohort}"), out=tmp_path / str(cohort))
        states[cohort] = flatten(made.federation.coordinator.shared)
    for name, tensor in states[1].items():
        torch.testing.assert_close(states[3][name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.long
def test_defenses_judge_a_change_by_the_silos_own_broadcast(tiny_config, tmp_path):
    """An honest change is small beside the bounds; measured from another rank's parts it had no meaning at all."""
    words = ("aggregation.clip=100", "aggregation.max_norm=100", "aggregation.outlier=50")
    plain, bounded = (
        run(tiny_config("flexlora", *MIXED, *more), out=tmp_path / str(len(more))).summary for more in ((), words)
    )
    assert bounded["shared_sha256"] == plain["shared_sha256"]
    with pytest.raises(InputError, match="noise_multiplier"):
        tiny_config("hetlora", *MIXED, "aggregation.noise_multiplier=1", "aggregation.clip=1")


def test_a_changed_rank_is_refused_on_resuming(tiny_config, tmp_path):
    run(tiny_config("hetlora", *MIXED), out=tmp_path / "run")
    with pytest.raises(InputError, match=r"tuner.ranks.beta: 1 → 2"):
        run(tiny_config("hetlora", *QUICK, "tuner.ranks.beta=2"), out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("method", ["flexlora", pytest.param("hetlora", marks=pytest.mark.long)])
def test_a_finished_run_has_every_silos_own_model(method, tiny_config, tmp_path):
    made = run(tiny_config(method, *MIXED, "tuner.alpha=6"), out=tmp_path / "run")
    federation, texts = made.federation, {"alpha": "the garden was kind", "beta": ("the garden was kind", "and warm")}
    loaded = load_run(tmp_path / "run")
    for name, rank in {"alpha": 4, "beta": 1}.items():
        states = [current_model_state(one.federation, one.federation.silos[name]) for one in (made, loaded)]
        assert digest(flatten(states[0])) == digest(flatten(states[1]))
        adapter = {n: tensor for n, tensor in states[0]["global"].items() if n.endswith("lora_A.weight")}
        assert {len(tensor) for tensor in adapter.values()} == {rank}
        models = [made.model(name), loaded.model(name), load_model(tmp_path / "run", name)]
        assert len({json.dumps(model.predict([texts[name]])[0].probabilities) for model in models}) == 1
        export(loaded.model(name), "global", tmp_path / name)
        config = json.loads((tmp_path / name / "adapter_config.json").read_text(encoding="utf-8"))
        assert (config["r"], config["lora_alpha"]) == (rank, 6 * rank / 4)  # one scale alpha / r for all silos
    assert federation.coordinator.shared["global"].keys() == states[0]["global"].keys()


def test_a_start_is_not_cut_where_whole_products_are_added_up(tiny_config):
    config = tiny_config("flora", "tuner.ranks.alpha=2").model_copy(update={"start": "folder"})
    with pytest.raises(InputError, match=r"^start: method flora adds up whole .*allowed: without tuner.ranks$"):
        check_start(config, make_method(config))
    equal = tiny_config("flora").model_copy(update={"start": "folder"})
    check_start(equal, make_method(equal))
