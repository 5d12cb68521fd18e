"""Answers of one silo that are not what a silo answers: refused with the reason, and the round unharmed.

The engine, its dispatcher and the silos' sessions are the real ones; `session_rig.DirectLink` replaces Flower.
All that can be wrong with a message is drawn in `tests/communication/`; here whole answers arrive among honest ones.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load, save

from silotune.aggregation import Update
from silotune.distributed.coordinator import coordinate as coordinate_module
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.engine import FlowerEngine
from silotune.distributed.protocol.frames import Frame, decode
from silotune.distributed.silo.session import Session
from tests.support.session_rig import DirectLink, job, local_configs

VICTIM, HONEST = "beta", ["alpha", "gamma"]
ROUND = 2
WAYS = {"plain": (), "compressed": ("uplink=clip,int8", "uplink.clip=100")}


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


def tensors_with(change):
    """An answer whose message's first float tensor is another one."""

    def harm(exchange: Round) -> bytes:
        good = exchange.honest[VICTIM]
        message = good.blobs["message"]
        tensors = load(message)
        name = next(key for key, value in sorted(tensors.items()) if value.is_floating_point())
        length = int.from_bytes(message[:8], "little")
        metadata = json.loads(message[8 : 8 + length])["__metadata__"]
        changed = tensors | {name: change(tensors[name])}
        return replace(good, blobs={"message": save(changed, metadata=metadata)}).encode()

    return harm


def answer_with(**fields):
    """An answer with another field around its message."""
    return lambda exchange: replace(exchange.honest[VICTIM], fields=exchange.honest[VICTIM].fields | fields).encode()


def frame_with(**parts):
    """An answer of which something other than its fields is different."""
    return lambda exchange: replace(exchange.honest[VICTIM], **parts).encode()


MALFORMED = {
    "not finite": (tensors_with(lambda tensor: tensor * math.nan), "NaN or infinity"),
    "huge": (tensors_with(lambda tensor: tensor * 0 + 1e30), "above aggregation.max_norm|becomes NaN"),
    "no message": (frame_with(blobs={"message": b"junk"}), "not a silotune message"),
    "no blob": (frame_with(blobs={}), "without metrics or message"),
    "another kind": (frame_with(kind="scores"), "answered with 'scores'"),
    "an earlier answer": (lambda exchange: exchange.earlier.encode(), "for round 1, asked was round 2"),
    "an earlier message": (
        lambda exchange: replace(exchange.honest[VICTIM], blobs=exchange.earlier.blobs).encode(),
        "update of round 1, expected 2",
    ),
    "another silo's answer": (lambda exchange: exchange.honest["alpha"].encode(), "in another name"),
    "another silo's message": (
        lambda exchange: replace(exchange.honest[VICTIM], blobs=exchange.honest["alpha"].blobs).encode(),
        "in the name of",
    ),
    **{f"silo {name!r}": (answer_with(silo=name), "another name") for name in ("alpha", None)},
    **{f"round {number!r}": (answer_with(round=number), "for round") for number in (3, 2.0, None)},
    **{f"state {name!r:.20}": (answer_with(state=name), "state") for name in ("../0002", None, "x" * 9000)},
    **{
        f"metrics {value!r:.30}": (answer_with(metrics=value), "without metrics")
        for value in (None, {"rows": math.nan}, {str(n): 1 for n in range(2000)})
    },
    **{
        f"scores {value!r}": (answer_with(scores=value), "something else than scores")
        for value in (None, {"validation": -1})
    },
    "a cut frame": (lambda exchange: exchange.honest[VICTIM].encode()[:-1], "frame"),
}
"""Bytes of an answer, and what one of the reasons says."""


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


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("way", WAYS)
def test_malformed_answers_are_refused_and_the_round_goes_on(rounds, way, case):
    exchange, (harm, refusal) = rounds(way), MALFORMED[case]
    updates, reasons = exchange.answered(harm(exchange))
    assert_unharmed(exchange, updates)
    assert all(len(reason.splitlines()) == 1 and len(reason) < 1000 for reason in reasons)
    assert any(part in reason for reason in reasons for part in refusal.split("|")), reasons
