"""Answers of one silo that are not what a silo answers, by 500 draws: refused with the reason, the round unharmed.

The engine, its dispatcher and the silos' sessions are the real ones; `session_rig.DirectLink` replaces Flower.
Messages alone are in `tests/communication/`; here whole
answers arrive among those of honest silos.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from silotune.aggregation import Update
from silotune.core.tensors import flatten
from silotune.distributed.coordinator import coordinate as coordinate_module
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.engine import FlowerEngine
from silotune.distributed.protocol.frames import Frame, decode
from silotune.distributed.silo.session import Session
from tests.support.session_rig import DirectLink, job, local_configs

VICTIM, HONEST = "beta", ["alpha", "gamma"]
ROUND = 2
WAYS = {"plain": (), "compressed": ("uplink=clip,int8", "uplink.clip=100")}
EXAMPLES = 250
"""A way; both together are 500."""


class Captured(Exception):
    """The engine is had."""


@dataclass
class Clock:
    """A second a look, so that no draw depends on how busy the machine is."""

    seconds: float

    def now(self) -> float:
        return self.seconds

    def sleep(self, _: float) -> None:
        self.seconds += 1


@dataclass
class Round:
    """A federation before its second round: what honest silos answer there, and what one of them answered before."""

    engine: FlowerEngine
    link: DirectLink
    broadcast: bytes
    honest: dict[str, Frame]
    earlier: Frame
    updates: dict[str, Update]

    def answered(self, data: bytes) -> tuple[dict[str, Update], list[str]]:
        """The round's updates where the victim's node answers this, and the reasons in the events."""
        self.link.joined[NODES.index(VICTIM)] = lambda _: data
        log = self.engine.folder.path / "events.jsonl"
        before = log.stat().st_size
        shared = self.engine.coordinator_bytes()
        updates = list(self.engine._updates(ROUND, NODES, lambda _: self.broadcast, set(), set()))
        assert self.engine.coordinator_bytes() == shared
        events = [json.loads(line) for line in log.read_bytes()[before:].decode().splitlines()]
        reasons = [event["reason"] for event in events if event["event"] in ("refused", "silo-failed")]
        assert {event["silo"] for event in events if "reason" in event} <= {VICTIM}
        return {update.silo: update for update in updates}, reasons


NODES = sorted([*HONEST, VICTIM])


class _Stopping(FlowerEngine):
    """Plays the first round, then hands itself out."""

    def run(self) -> None:
        self._restore()
        self._round(1, final=False)
        raise Captured(self)

    def coordinator_bytes(self) -> bytes:
        return self.federation.coordinator.broadcast(ROUND)


@pytest.fixture(scope="module")
def rounds(tiny_config, tmp_path_factory):
    """`rounds(way)` → a `Round`, made once."""
    cache: dict[str, Round] = {}

    def make(way: str) -> Round:
        if way in cache:
            return cache[way]
        words = ["rounds=3", "train.steps=1", "aggregation.max_norm=1000", "federation.quorum=0.6"]
        words += ["federation.retries=0", "federation.deadline=60"]
        config = tiny_config("fedmcp", *words, *WAYS[way])
        out = tmp_path_factory.mktemp(way) / "run"
        configs = local_configs(config, out)
        sessions = [Session(configs[name]).answer for name in NODES]
        link = DirectLink(dict(enumerate(sessions)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coordinate_module, "FlowerEngine", _Stopping)
            with pytest.raises(Captured) as captured:
                coordinate(job(config, out, configs), link)
        (engine,) = captured.value.args
        earlier = [decode(data) for _, data in link.came]
        came = len(link.came)
        broadcast = engine.federation.coordinator.broadcast(ROUND)
        updates = list(engine._updates(ROUND, NODES, lambda _: broadcast, set(), set()))
        honest = {frame.fields["silo"]: frame for frame in (decode(data) for _, data in link.came[came:])}
        assert sorted(honest) == sorted(update.silo for update in updates) == NODES
        # from here on only the victim answers anew, and what cannot be read is asked again for a moment only
        for name in HONEST:
            data = honest[name].encode()
            link.joined[NODES.index(name)] = lambda _, data=data: data
        clock = Clock(time.monotonic())
        engine._dispatcher.clock, engine._dispatcher.sleep = clock.now, clock.sleep
        engine._options = engine._options.model_copy(update={"deadline": 3.0})
        (first,) = [f for f in earlier if f.kind == "answer" and f.fields["silo"] == VICTIM]
        cache[way] = Round(engine, link, broadcast, honest, first, {update.silo: update for update in updates})
        return cache[way]

    return make


# -- what may be wrong -------------------------------------------------------------------------------------------------


def repacked(message: bytes, tensors, **fields) -> bytes:
    length = int.from_bytes(message[:8], "little")
    old_fields = json.loads(json.loads(message[8 : 8 + length])["__metadata__"]["silotune"])
    return save(tensors, metadata={"silotune": json.dumps(old_fields | fields)})


def harm_tensor(draw, good: Frame) -> tuple[bytes, str]:
    """One tensor of the message: extra, missing, renamed, of another shape or dtype, not finite, huge."""
    message = good.blobs["message"]
    tensors = load(message)
    name = draw(st.sampled_from(sorted(tensors)))
    tensor = tensors[name]
    harm = draw(st.sampled_from(["extra", "missing", "renamed", "shape", "dtype", "not finite", "huge"]))
    if harm == "extra":
        extra = draw(st.sampled_from(["private/x", "head/out.weight", "global/x", "../x", "x" * 3000]))
        tensors[extra] = torch.ones(draw(st.integers(0, 50)))
        return repacked(message, tensors), "unexpected"
    if harm == "missing":
        for gone in draw(st.sets(st.sampled_from(sorted(tensors)), min_size=1)):
            del tensors[gone]
        return repacked(message, tensors), "missing"
    if harm == "renamed":
        tensors[draw(st.sampled_from([name + " ", name.upper(), f"private/{name}", name[:-1]]))] = tensors.pop(name)
        return repacked(message, tensors), "missing"
    if harm == "shape":
        shape = draw(st.lists(st.integers(0, 9), max_size=3).filter(lambda sizes: sizes != list(tensor.shape)))
        return repacked(message, tensors | {name: torch.zeros(shape, dtype=tensor.dtype)}), "has shape"
    if harm == "dtype":
        others = [torch.float64, torch.float16, torch.bfloat16, torch.int16, torch.uint8, torch.bool]
        other = draw(st.sampled_from([dtype for dtype in others if dtype is not tensor.dtype]))
        return repacked(message, tensors | {name: torch.zeros(tensor.shape, dtype=other)}), "has dtype"
    floats = draw(st.sampled_from(sorted(key for key, value in tensors.items() if value.is_floating_point())))
    changed = tensors[floats].clone()
    index = draw(st.integers(0, changed.numel() - 1))
    if harm == "huge":
        changed.view(-1)[:] = draw(st.sampled_from([1e6, 1e18, 1e30]))
        return repacked(message, tensors | {floats: changed}), r"above aggregation.max_norm|becomes NaN"
    changed.view(-1)[index] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return repacked(message, tensors | {floats: changed}), "NaN or infinity"


def harm_fields(draw, good: Frame) -> tuple[bytes, str]:
    """What the message says of itself: another round, silo, row count, uplink; a field too many."""
    message = good.blobs["message"]
    key, value, reason = draw(
        st.one_of(
            st.tuples(st.just("round"), st.integers(-5, 2**70).filter(lambda n: n != ROUND), st.just("expected 2")),
            st.tuples(
                st.just("silo"), st.sampled_from(["alpha", "gamma", "", "Beta", "beta "]), st.just("in the name")
            ),
            st.tuples(st.just("rows"), st.integers(-(2**70), 0) | st.integers(2**53 + 1, 2**80), st.just("'rows'")),
            st.tuples(
                st.just("uplink"), st.sampled_from(["", "clip", "int4"]), st.just("fields must be|expected clip")
            ),
            st.tuples(st.sampled_from(["private", "norm"]), st.integers(), st.just("fields must be")),
        )
    )
    return repacked(message, load(message), **{key: value}), reason


def harm_bytes(draw, good: Frame) -> tuple[bytes, str]:
    """Cut short, longer, or no message at all."""
    message = good.blobs["message"]
    cut = draw(st.integers(0, len(message) - 1))
    junk = draw(st.binary(min_size=1, max_size=50))
    return draw(st.sampled_from([message[:cut], message + junk, junk, b""])), "not a silotune message"


def whole_answers(draw, exchange: Round) -> tuple[Frame, str]:
    """Answers that are well formed, but not this silo's to this request."""
    good = exchange.honest[VICTIM]
    other = exchange.honest[draw(st.sampled_from(HONEST))]
    return draw(
        st.sampled_from(
            [
                (exchange.earlier, "for round 1, asked was round 2"),  # replayed as a whole
                (replace(exchange.earlier, fields=good.fields), "update of round 1, expected 2"),  # its message alone
                (other, "in another name"),
                (replace(good, blobs=other.blobs), "in the name of"),
                (replace(good, kind="scores"), "answered with 'scores'"),
                (replace(good, kind="hello"), "answered with 'hello'"),
                (replace(good, blobs={}), "without metrics or message"),
                (replace(good, blobs={"messages": good.blobs["message"]}), "without metrics or message"),
            ]
        )
    )


def harm_answer(draw, good: Frame) -> tuple[Frame, str]:
    """One field of the answer around the message."""
    key, value, reason = draw(
        st.one_of(
            st.tuples(st.just("round"), st.sampled_from([1, 3, -1, 2.0, "2", None, True, [2]]), st.just("for round")),
            st.tuples(
                st.just("state"), st.sampled_from(["0001", "../0002", "", 2, None, "x" * 9000]), st.just("state")
            ),
            st.tuples(
                st.just("metrics"),
                st.sampled_from([None, [], "x", {"rows": math.nan}, {"rows": -1}, {"seconds": math.inf}, {"round": 9},
                                 {"silo": 1}, {"rows": 10**400}, {"rows": "7"}, {"loss": None}, {"event": 1},
                                 {str(n): 1 for n in range(2000)}]),
                st.just("without metrics"),
            ),
            st.tuples(
                st.just("scores"),
                st.sampled_from([None, [], 50, {"validation": -1}, {"validation": math.nan}, {"validation": "50"},
                                 {"validation": 50, "asr": 1}, {"metric": "f1"}, {"rows": 7}]),
                st.just("something else than scores"),
            ),
            st.tuples(st.just("silo"), st.sampled_from(["alpha", "", None, 3, ["beta"]]), st.just("another name")),
        )
    )  # fmt: skip
    return replace(good, fields=good.fields | {key: value}), reason


def harm_frame(draw, good: Frame) -> tuple[bytes, str]:
    """Bytes that are no frame: cut off, longer, or something else."""
    data = good.encode()
    cut = draw(st.integers(0, len(data) - 1))
    return draw(st.sampled_from([data[:cut], data + b"x", b"\x80\x04." + data, draw(st.binary(max_size=60))])), "frame"


@dataclass(frozen=True)
class Case:
    """Kind, bytes of the answer, and what the reason says."""

    kind: str
    data: bytes = field(repr=False)
    refusal: str


@st.composite
def malformed(draw: st.DrawFn, exchange: Round) -> Case:
    """One answer with one thing wrong."""
    good = exchange.honest[VICTIM]
    kind = draw(st.sampled_from(["tensor", "tensor", "tensor", "fields", "bytes", "whole", "answer", "frame"]))
    if kind == "frame":
        return Case(kind, *harm_frame(draw, good))
    if kind in ("whole", "answer"):
        frame, reason = whole_answers(draw, exchange) if kind == "whole" else harm_answer(draw, good)
        return Case(kind, frame.encode(), reason)
    message, reason = {"tensor": harm_tensor, "fields": harm_fields, "bytes": harm_bytes}[kind](draw, good)
    return Case(kind, replace(good, blobs={"message": message}).encode(), reason)


def assert_unharmed(exchange: Round, updates: dict[str, Update]) -> None:
    assert sorted(updates) == HONEST
    for name in HONEST:
        expected = exchange.updates[name].tensors
        assert updates[name].tensors.keys() == expected.keys()
        assert all(torch.equal(updates[name].tensors[key], tensor) for key, tensor in expected.items())


def test_the_honest_answer_is_taken(rounds):
    """So that what follows is refused for its one fault."""
    for way in WAYS:
        exchange = rounds(way)
        updates, reasons = exchange.answered(exchange.honest[VICTIM].encode())
        assert (sorted(updates), reasons) == (NODES, [])


@pytest.mark.parametrize("way", WAYS)
def test_malformed_answers_are_refused_and_the_round_goes_on(rounds, way):
    exchange = rounds(way)
    seen: dict[str, int] = {}

    @given(malformed(exchange))
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(case):
        updates, reasons = exchange.answered(case.data)
        assert_unharmed(exchange, updates)
        assert reasons
        assert all(len(reason.splitlines()) == 1 and len(reason) < 1000 for reason in reasons)
        assert any(_says(reason, case.refusal) for reason in reasons), (case, reasons)
        seen[case.kind] = seen.get(case.kind, 0) + 1

    check()
    assert sum(seen.values()) >= EXAMPLES
    assert min(seen.values()) > EXAMPLES / 50
    assert seen.keys() == {"tensor", "fields", "bytes", "whole", "answer", "frame"}


def _says(reason: str, refusal: str) -> bool:
    return any(part in reason for part in refusal.split("|"))


def test_what_is_aggregated_is_the_mean_of_the_others(rounds):
    """In float64 by NumPy, from the honest silos' messages."""
    exchange = rounds("plain")
    broken = replace(exchange.honest[VICTIM], blobs={"message": exchange.earlier.blobs["message"]}).encode()
    updates, _ = exchange.answered(broken)
    coordinator = exchange.engine.federation.coordinator
    before = coordinator.shared
    try:
        coordinator.aggregate(list(updates.values()), ROUND)
        result = flatten(coordinator.shared)
    finally:
        coordinator.shared = before
    sent = [load(exchange.honest[name].blobs["message"]) for name in HONEST]
    for name, tensor in result.items():
        expected = np.mean([tensors[name].double().numpy() for tensors in sent], axis=0)
        np.testing.assert_array_max_ulp(tensor.numpy(), expected.astype(np.float32), maxulp=1)
