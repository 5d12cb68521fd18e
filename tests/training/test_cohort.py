"""`cohort=K`: silos that train together end with what they end with one by one; for every method and tuner that can."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch

from silotune.communication.messages import Expected
from silotune.core.tensors import flatten
from silotune.data.batching import CALL_COST, epoch_batches, make_batch
from silotune.data.cohort_batches import cut_jointly, join
from silotune.distributed.protocol.handshake import check_federated
from silotune.errors import Diverged, InputError
from silotune.methods import METHODS as CLASSES
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.run import run
from silotune.runs.storage.run_folder import RunFolder
from silotune.training import at_once
from silotune.training.at_once import COHORT_ON_A_GPU, ROWS_ON_A_CPU
from tests.support.method_cases import KINDS_OF_METHODS, assert_as_if_never_interrupted, logged, of_kinds
from tests.support.numeric_rig import doubled, parts_in_double
from tests.support.tiny import METHODS, ONE_TASK, UNPARTITIONED, tiny_overrides, write_data

UNLIKE = {"alpha": 10, "beta": 21, "gamma": 14}
"""Rows: 2, 3 and 2 steps of 8 rows, the last ones ragged; two or three labels."""
ALIKE = {"east": 10, "north": 21, "west": 14}

CANNOT = {name for name in METHODS if CLASSES[name].defaults.get("tuner") in ("full", "prompt")}
CAN = [name for name in METHODS if name not in CANNOT and not CLASSES[name].centralized]
FAST = ["fedmcp", "feddpa-t"]

TUNERS = {
    "lora": ("tuner=lora",),
    "lora, all sites": (
        "tuner=lora",
        "tuner.sites=query,key,value,attention_output,feedforward_input,feedforward_output",
    ),
    "lora with dropout": ("tuner=lora", "tuner.dropout=0.3"),
    "dora with pissa": ("tuner=dora", "tuner.init=pissa"),
    "vera": ("tuner=vera", "tuner.r=16"),
    "bottleneck behind the feed-forward": ("tuner=bottleneck", "tuner.sites=pfeiffer"),
    "ia3": ("tuner=ia3",),
    "bitfit": ("tuner=bitfit", "train.optimizer=sgd"),  # a key's bias has no gradient; Adam makes steps of rounding
}


@pytest.fixture(scope="module")
def silos_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cohort")
    for task, rows in UNLIKE.items():
        write_data(folder / "unlike", [task], {"train": rows, "validation": 9, "test": 9})
    (folder / "alike").mkdir()
    for seed, (silo, rows) in enumerate(ALIKE.items()):
        written = write_data(folder / f"seed{seed}", ["alpha"], {"train": rows, "validation": 9, "test": 9}, seed)
        (written / "alpha").rename(folder / "alike" / silo)
    return folder


@pytest.fixture
def words(silos_folder, backbone_folder):
    def make(method, *overrides):
        one_task = method in ONE_TASK
        rows, data = (ALIKE, "alike") if one_task else (UNLIKE, "unlike")
        task = ["data.task=alpha", *UNPARTITIONED, "server.labels_per_class=4", "head=linear"] if one_task else []
        own = tiny_overrides(method, backbone_folder("bert"), silos_folder / data)
        return [*own, f"data.tasks=[{','.join(rows)}]", *task, *overrides]

    return make


@pytest.fixture
def federation_of(words, monkeypatch):
    """Federations whose parts, messages and backbone are in double precision."""
    parts_in_double(monkeypatch)
    monkeypatch.setattr(Expected, "dtype", lambda *_: torch.float64)
    return lambda method, *overrides: doubled(build(read_config("demo", words(method, *overrides))))


def assert_close(found, expected, tolerance=1e-10):
    """Every tensor, relative to its part's largest number."""
    assert found.keys() == expected.keys()
    largest = {}
    for name, tensor in expected.items():
        part = name.rpartition("/")[0]
        largest[part] = max(largest.get(part, 0.0), float(tensor.double().abs().max()))
    for name, tensor in expected.items():
        bound = tolerance * largest[name.rpartition("/")[0]]
        assert float((found[name] - tensor).double().abs().max()) <= bound, name


def assert_same_round(found, expected):
    assert_close(flatten(found.state), flatten(expected.state))
    assert_close(found.memory, expected.memory)
    clock = {"seconds", "padded_tokens"}
    assert found.metrics.keys() == expected.metrics.keys()
    for name in found.metrics.keys() - clock:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-10, abs=1e-12), name
    assert found.note == expected.note


def aside(shared, seed):
    """Shared parts that are not those a silo began with."""
    draws = torch.Generator().manual_seed(seed)
    return {
        part: {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=draws, dtype=torch.float64)
            for name, tensor in tensors.items()
        }
        for part, tensors in shared.items()
    }


def compare_rounds(make, numbers=(1, 2)):
    """Two rounds, in the second of which silos have memories; every silo's parts, memory, losses and counts."""
    serial, cohort = make("cohort=1"), make("cohort=3")
    for number in numbers:
        shared = aside(serial.coordinator.shared, number)
        silos = sorted(serial.silos)
        expected = [serial.trainer.rounds([serial.silos[name]], shared, number)[0] for name in silos]
        found = cohort.trainer.rounds([cohort.silos[name] for name in silos], shared, number)
        for one, other in zip(found, expected, strict=True):
            assert_same_round(one, other)
        for federation, results in ((serial, expected), (cohort, expected)):  # both go on from the same
            for name, result in zip(silos, results, strict=True):
                federation.client()._keep(federation.silos[name], result)
    return expected, shared, silos, serial, cohort


@pytest.mark.parametrize("method", of_kinds(CAN, KINDS_OF_METHODS))
def test_a_round_is_the_serial_one(method, federation_of):
    quick = ("method.eta=0.05",) if method == "pfedme" else ()  # w follows slowly otherwise
    expected, shared, silos, serial, cohort = compare_rounds(lambda *more: federation_of(method, *quick, *more))
    assert [result.metrics["steps"] % 10 for result in expected] != [expected[0].metrics["steps"] % 10] * 3
    if any(shared.values()):
        assert any(  # else equality would say nothing
            float((tensor - shared[part][name]).abs().max()) > 1e-3
            for result in expected
            for part in result.state.keys() & shared.keys()
            for name, tensor in result.state[part].items()
        )
    finals = cohort.trainer.finals([cohort.silos[name] for name in silos], shared, 2)
    for name, found in zip(silos, finals, strict=True):
        assert_same_round(found, serial.trainer.finals([serial.silos[name]], shared, 2)[0])


FEW = ("lora with dropout", "dora with pissa", "bottleneck behind the feed-forward", "ia3")
EVERY_TUNER = [
    *(pytest.param("fedmcp", tuner, marks=() if tuner in FEW else pytest.mark.long) for tuner in TUNERS),
    pytest.param("feddpa-t", "lora with dropout", marks=pytest.mark.long),
]
"""`models/tuners/test_segments.py` has all tuners, without rounds."""


@pytest.mark.parametrize(("method", "tuner"), EVERY_TUNER)
def test_with_every_tuner(method, tuner, federation_of):
    compare_rounds(lambda *more: federation_of(method, *TUNERS[tuner], *more), numbers=(1,))


@pytest.mark.parametrize(
    "more",
    [
        ("cache=frozen-prefix", "tuner.sites=encoder.layer.1.attention.output.dense,encoder.layer.1.output.dense"),
        ("train.optimizer=adafactor",),
        ("train.steps=5",),
        ("train.epochs=2", "train.batch_size=3"),
        ("train.batches=even", "train.batch_size=7"),
        ("head=linear", "head.pooling=mean"),
    ],
)
def test_with_other_options(more, federation_of):
    compare_rounds(lambda *words: federation_of("fedmcp", *more, *words), numbers=(1,))


def test_on_a_family_without_segments_that_pads_otherwise(federation_of, backbone_folder):
    backbone = f"backbone={backbone_folder('roberta')}"
    compare_rounds(lambda *words: federation_of("fedmcp", backbone, *words), numbers=(1,))


def test_a_silo_without_a_memory_beside_silos_that_have_one(federation_of):
    """MOON's previous and received are one view in the new silo alone; FedFAME's new silo passes its phase over."""
    for method, new in (("moon", "beta"), ("fedfame", "north")):
        serial, cohort = federation_of(method, "cohort=1"), federation_of(method, "cohort=3")
        shared, silos = serial.coordinator.shared, sorted(serial.silos)
        for name in silos:
            if name != new:
                result = serial.trainer.rounds([serial.silos[name]], shared, 1)[0]
                for federation in (serial, cohort):
                    federation.client()._keep(federation.silos[name], result)
        shared = aside(shared, 2)
        expected = [serial.trainer.rounds([serial.silos[name]], shared, 2)[0] for name in silos]
        found = cohort.trainer.rounds([cohort.silos[name] for name in silos], shared, 2)
        for one, other in zip(found, expected, strict=True):
            assert_same_round(one, other)
        assert any(result.note for result in found) == (method == "fedfame")


def two_rounds(federation, out):
    engine = InProcessEngine(federation, RunFolder.create(out, "", "", False))
    engine.run()
    silos = {
        f"{name}/{key}": tensor for name, silo in federation.silos.items() for key, tensor in silo.state.flat().items()
    }
    return federation.coordinator.flat() | silos, engine.history


def compare_runs(method, federation_of, folder):
    states, history = zip(
        *(two_rounds(federation_of(method, f"cohort={size}"), folder / str(size)) for size in (1, 2)), strict=True
    )
    assert_close(states[1], states[0])
    assert history[1].best_round == history[0].best_round
    assert history[1].validation == pytest.approx(history[0].validation)
    assert (history[1].bytes_up, history[1].bytes_down) == (history[0].bytes_up, history[0].bytes_down)
    for kind in ("silo", "final"):
        found, expected = (
            {(event["round"], event["silo"]): event for event in logged(folder / str(size), kind)} for size in (2, 1)
        )
        assert found.keys() == expected.keys()
        for key, event in expected.items():
            assert found[key].keys() == event.keys()
            for name in event.keys() - {"event", "silo", "note", "seconds", "time", "padded_tokens"}:
                assert found[key][name] == pytest.approx(event[name], rel=1e-10, abs=1e-12), (key, name)
            assert found[key].get("note") == event.get("note")


@pytest.mark.parametrize("method", FAST)
def test_a_run_is_the_serial_one(method, federation_of, tmp_path):
    """Two rounds with aggregation, checkpoints and scores; cohorts of two and one silo."""
    compare_runs(method, federation_of, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("method", [name for name in CAN if name not in FAST])
def test_a_run_is_the_serial_one_with_every_method(method, federation_of, tmp_path):
    compare_runs(method, federation_of, tmp_path)


RECIPE = (
    *("train.optimizer=adamw", "train.schedule=cosine", "train.schedule_over=run", "train.warmup=0.2"),
    *("train.weight_decay=0.1", "train.clip_norm=0.3", "train.keep_optimizer=true", "train.epochs=2"),
    *("train.label_smoothing=0.1", "train.class_weights=balanced"),
)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedavg", "fedmcp"])
def test_a_run_under_a_whole_recipe_is_the_serial_one(method, federation_of, tmp_path):
    """Each silo has its own rates, norm, weights and optimizer's state, which its memory holds."""
    compare_runs(method, lambda name, *words: federation_of(name, *words, *RECIPE), tmp_path)


@pytest.mark.parametrize("method", [pytest.param("fedmcp", marks=pytest.mark.long), "fedlora"])
def test_resumed_in_the_middle_with_the_same_bits(method, words, tmp_path):
    config = read_config("demo", words(method, "cohort=2"))
    calls = []
    whole = run(config, out=tmp_path / "whole", progress=lambda *call: calls.append(call))
    for at in range(1, len(calls), 2):
        reports = calls[:at]
        with pytest.raises(IndexError, match="pop from empty list"):  # the report behind them ends the run
            run(config, out=tmp_path / str(at), progress=lambda *_, reports=reports: reports.pop())
        assert_as_if_never_interrupted(run(config, out=tmp_path / str(at), resume=True), whole)


def test_the_order_of_silos_and_who_else_trains_changes_nothing_but_rounding(federation_of):
    federation = federation_of("fedmcp", "cohort=3")
    shared, silos = federation.coordinator.shared, federation.silos
    first = federation.trainer.rounds([silos[name] for name in ("alpha", "beta", "gamma")], shared, 1)
    second = federation.trainer.rounds([silos[name] for name in ("gamma", "alpha")], shared, 1)
    assert_same_round(second[0], first[2])
    assert_same_round(second[1], first[0])


def test_dropout_where_silos_are_cut_into_unlike_numbers_of_micro_batches(federation_of, monkeypatch):
    """A joint micro-batch of one silo's rows alone draws from that silo's stream as well."""
    monkeypatch.setattr("silotune.data.batching.CALL_COST", 1)
    options = ("tuner=lora", "head.pooling=mean", "tuner.dropout=0.3", "method.adapters=1")
    together, serial = (federation_of("fedavg", *options, f"cohort={number}") for number in (2, 1))
    names = ("beta", "gamma")  # in their first batches one has two lengths, the other one
    found = together.trainer.rounds([together.silos[name] for name in names], together.coordinator.shared, 1)
    for name, one in zip(names, found, strict=True):
        assert_same_round(one, serial.trainer.rounds([serial.silos[name]], serial.coordinator.shared, 1)[0])


def test_who_diverges_is_named(words):
    federation = build(read_config("demo", words("fedavg", "cohort=3", "train.lr=1e30", "train.optimizer=sgd")))
    silos = [federation.silos[name] for name in sorted(federation.silos)]
    with pytest.raises(Diverged, match=r"silo '(alpha|beta|gamma)', round 1"):
        federation.trainer.rounds(silos, federation.coordinator.shared, 1)


# -- cutting ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def batches(words):
    """One uncut batch of each silo."""
    federation = build(read_config("demo", words("fedavg")))
    rows = [next(iter(silo.train.values())) for silo in federation.silos.values()]
    return [next(epoch_batches({own.task.name: own}, 8, 0, 1, own.task.name, call_cost=None)) for own in rows]


@pytest.mark.parametrize("cost", [0, CALL_COST, 2**14])
def test_every_row_is_in_one_piece_with_its_tokens(batches, cost):
    joints = cut_jointly(batches, 0, cost)
    seen = [[] for _ in batches]
    for joint in joints:
        assert [piece.owner for piece in joint.pieces] == sorted({piece.owner for piece in joint.pieces})
        assert joint.inputs["input_ids"].shape == (sum(joint.sizes), joint.width)
        for piece in joint.pieces:
            batch = batches[piece.owner]
            for row, ids, mask in zip(
                batch.rows[piece.rows].tolist(),
                piece.inputs["input_ids"].tolist(),
                piece.inputs["attention_mask"].tolist(),
                strict=True,
            ):
                own = batch.source.ids[row]
                assert ids == own + [0] * (joint.width - len(own))
                assert mask == [1] * len(own) + [0] * (joint.width - len(own))
                assert piece.width >= len(own)
                seen[piece.owner].append(row)
    assert seen == [batch.rows.tolist() for batch in batches]
    assert len(joints) == 1 or cost < 2**14


def test_cut_where_it_costs_least(batches):
    """Against all ways to cut the sorted widths of all rows, tried one by one."""
    for cost in (0, 5, CALL_COST):
        found = sum(sum(joint.sizes) * joint.width + cost for joint in cut_jointly(batches, 0, cost))
        longest = max(batch.source.longest for batch in batches)
        lengths = sorted(
            min(-(-len(batch.source.ids[row]) // 8) * 8, batch.source.longest)
            for batch in batches
            for row in batch.rows.tolist()
        )
        assert lengths[-1] <= longest
        best = min(
            sum((end - start) * lengths[end - 1] + cost for start, end in pairwise((0, *places, len(lengths))))
            for number in range(4)
            for places in combinations(range(1, len(lengths)), number)
        )
        assert found <= best


def test_own_micro_batches_beside_one_another(batches):
    cut = [make_batch(batch.source, batch.rows.tolist(), 0, 8) for batch in batches]
    joints = join(cut, 0)
    assert len(joints) == max(len(batch.micro) for batch in cut)
    for place, joint in enumerate(joints):
        for piece in joint.pieces:
            own = cut[piece.owner].micro[place].inputs
            assert piece.width == own["input_ids"].shape[1]
            for name, tensor in own.items():
                assert torch.equal(piece.inputs[name][:, : piece.width], tensor)
                assert not piece.inputs[name][:, piece.width :].any()


# -- what can be asked for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuner", ["prompt", "prefix", "p-tuning", "full"])
def test_refused_where_silos_cannot_share_a_forward(tuner, words):
    config = read_config("demo", words("fedavg", f"tuner={tuner}", "cohort=4"))
    with pytest.raises(InputError, match=rf"^cohort=4: .*tuner={tuner} on bert .*allowed: cohort=1 or auto$"):
        build(config)


def test_auto_says_why_silos_train_one_by_one(words, tmp_path):
    """The run ends in the bits of `cohort=1`, which is the default."""
    config = read_config("demo", words("fedavg", "tuner=prompt", "cohort=auto", "rounds=1"))
    for resume in (False, True):
        outcome = run(config, out=tmp_path / "run", resume=resume)
        (event,) = logged(tmp_path / "run", "cohort")
        assert event["size"] == outcome.summary["cohort"] == 1
        assert "tuner=prompt" in event["reason"]
    alone = run(read_config("demo", words("fedavg", "tuner=prompt", "rounds=1")), out=tmp_path / "alone")
    assert not logged(tmp_path / "alone", "cohort")
    assert alone.summary["state_sha256"] == outcome.summary["state_sha256"]


@pytest.mark.parametrize(("device", "most"), [("cpu", ROWS_ON_A_CPU // 8), ("cuda", COHORT_ON_A_GPU)])
def test_auto_is_what_pays_where_memory_has_room(device, most, words, monkeypatch):
    federation = build(read_config("demo", words("fedmcp")))
    monkeypatch.setattr(federation.backbone, "device", torch.device(device))
    weights = sum(tensor.nbytes for tensor in federation.backbone.model.parameters())
    monkeypatch.setattr(at_once, "kept_of_a_token", lambda *_: 1000)
    of_a_silo = 8 * 32 * 3 * 1000  # rows, tokens, trained views
    for room, size in ((2 * most * of_a_silo, most), (2 * 7 * of_a_silo, 7), (of_a_silo, 1), (2**40, most)):
        monkeypatch.setattr(at_once, "total_memory", lambda _, room=room: room + weights)
        found = at_once.choose_cohort("auto", federation.context, federation.silos.values())
        assert found.size == size
        assert ("memory" in found.reason) == (size < most)
    assert at_once.choose_cohort(5, federation.context, ()) == at_once.Cohort(5)


def test_auto_takes_what_tokens_at_once_has_room_for(words):
    """FedMCP trains three views of 8 rows of 32 tokens a silo."""
    of_a_silo = 3 * 8 * 32
    federation = build(read_config("demo", words("fedmcp", "train.tokens_at_once=2000")))
    context, silos = federation.context, [*federation.silos.values()]
    for bound, size in (
        (3 * of_a_silo + 1, 3),
        (2 * of_a_silo, 2),
        (of_a_silo - 1, 1),
        (10_000 * of_a_silo, ROWS_ON_A_CPU // 8),
    ):
        context.tokens_at_once = bound
        found = at_once.choose_cohort("auto", context, silos)
        assert found.size == size
        reason = f"train.tokens_at_once={bound} has room for {bound // of_a_silo}"
        assert found.reason == ("" if size == ROWS_ON_A_CPU // 8 else reason)
    assert at_once.choose_cohort(5, context, silos) == at_once.Cohort(5)


def test_auto_counts_both_answers_of_a_pair_and_the_tokens_of_decoders(words):
    """FedMCP trains three views; `TokenizedRows` says what a row of 32 tokens holds beside its text."""
    federation = build(read_config("demo", words("fedmcp", "train.tokens_at_once=2000", "train.batch_size=4")))
    context, silo = federation.context, next(iter(federation.silos.values()))
    ((task, rows),) = silo.train.items()
    context.tokens_at_once = 4 * 3 * 4 * 32
    for more, size in (
        ({}, 4),
        ({"sizes": [2] * (len(rows) // 2)}, 2),
        ({"decoder": [[1] * 32] * len(rows)}, 2),
        ({"sizes": [2] * (len(rows) // 2), "decoder": [[1] * 32, [1]]}, 1),
        ({"sizes": [4, *[1] * (len(rows) - 4)]}, 1),
    ):
        silo.train = {task: replace(rows, **more)}
        assert at_once.choose_cohort("auto", context, [silo]).size == size, more


def test_auto_trains_silos_of_a_causal_model_one_by_one_on_a_cpu(words, model_folder, monkeypatch):
    overrides = (f"backbone={model_folder('llama')}", "tuner=lora", "head.pooling=last", "cohort=auto")
    federation = build(read_config("demo", words("fedavg", *overrides)))
    context, silos = federation.context, federation.silos.values()
    monkeypatch.setattr(at_once, "MANY_SILOS", len(silos))
    for configured in ("auto", None):
        found = at_once.choose_cohort(configured, context, silos)
        assert found.size == 1
        assert "causal" in found.reason
    assert at_once.choose_cohort(3, context, silos) == at_once.Cohort(3)
    monkeypatch.setattr(federation.backbone, "device", torch.device("cuda"))
    monkeypatch.setattr(at_once, "kept_of_a_token", lambda *_: 1000)
    monkeypatch.setattr(at_once, "total_memory", lambda _: 2**40)
    assert at_once.choose_cohort("auto", context, silos) == at_once.Cohort(COHORT_ON_A_GPU)


def test_many_silos_share_forwards_by_default(words, tmp_path, monkeypatch):
    """And their scores are those of silos that are scored one by one."""
    config, numbers = read_config("demo", words("ditto", "rounds=1")), {}
    for many in (3, 4):  # there are three silos
        monkeypatch.setattr(at_once, "MANY_SILOS", many)
        numbers[many] = run(config, out=tmp_path / f"{many}")
    assert numbers[3].summary["cohort"] > 1 == numbers[4].summary["cohort"]
    assert [event["size"] for event in logged(tmp_path / "3", "cohort")] == [numbers[3].summary["cohort"]]
    assert not logged(tmp_path / "4", "cohort")
    for name, silo in numbers[3].silos.items():
        assert silo["test"] == pytest.approx(numbers[4].silos[name]["test"])


def test_not_between_machines(words):
    with pytest.raises(InputError, match=r"^cohort=2: every silo trains on its own machine"):
        check_federated(read_config("demo", words("fedavg", "cohort=2")))
    for allowed in ("", "1", "auto"):
        check_federated(read_config("demo", words("fedavg", f"cohort={allowed}")))
