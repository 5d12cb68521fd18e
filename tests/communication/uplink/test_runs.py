"""Whole runs of every method with an uplink: what leaves, the same bits for any order of silos and after a resume.

`make test` runs a few methods, `make test-all` every one.
"""

from __future__ import annotations

import functools
import json
import math

import dp_accounting
import numpy as np
import pytest
import torch
from scipy import stats

from silotune.aggregation import BroadcastAggregation, score_read_by
from silotune.communication.uplink import BUILT_IN_CODECS
from silotune.config import registries
from silotune.core.tensors import digest, flatten
from silotune.methods import METHODS
from silotune.methods.parts import Scope
from silotune.runs.run_result import Run
from silotune.training.coordinator import Coordinator
from tests.support.method_cases import CASES, Federate, Wire, read_message, same, tapped

CLIP, EPSILON, DELTA = 0.5, 20.0, 1e-5
_NOISED = (f"uplink.clip={CLIP}", f"uplink.epsilon={EPSILON}")
UPLINKS = {
    "int8": ("uplink=int8",),
    "clip,laplace": ("uplink=clip,laplace", *_NOISED),
    "clip,gaussian": ("uplink=clip,gaussian", *_NOISED, f"uplink.delta={DELTA}"),
}
SHORT = {
    *(("fedmcp", "int8"), ("fedavg", "clip,laplace"), ("fedfame", "int8"), ("local", "clip,laplace")),
    ("fedprompt", "clip,gaussian"),
}
PAIRS = [
    pytest.param(method, uplink, marks=() if (method, uplink) in SHORT else pytest.mark.long, id=f"{method}-{uplink}")
    for method in METHODS
    for uplink in UPLINKS
    if "clip" not in uplink
    or not score_read_by(str(METHODS[method].defaults.get("aggregation")))  # which noise refuses
]
every_pair = pytest.mark.parametrize(("method", "uplink"), PAIRS)
NO_FEEDBACK = {
    name
    for name, kind in registries.AGGREGATIONS.items()
    if isinstance(kind, type) and issubclass(kind, BroadcastAggregation) and not kind.changes_add_up
}
OTHER_CODECS = [
    pytest.param("fedmcp", name, marks=pytest.mark.long, id=f"fedmcp-{name}")
    for name in BUILT_IN_CODECS
    if name not in UPLINKS
]


def words(method: str, uplink: str) -> tuple[str, ...]:
    without = uplink == "int8" and METHODS[method].defaults.get("aggregation") in NO_FEEDBACK
    return *UPLINKS.get(uplink, (f"uplink={uplink}",)), *(("uplink.feedback=false",) if without else ())


@pytest.fixture(scope="session")
def sent(federate: Federate, tmp_path_factory: pytest.TempPathFactory):
    """`sent(method, uplink)` → a finished run and what passed in it, made once."""

    @functools.cache
    def found(method: str, uplink: str) -> tuple[Run, Wire]:
        with tapped() as wire:
            return federate.run(method, tmp_path_factory.mktemp("sent") / "run", *words(method, uplink)), wire

    return found


def sent_names(run: Run, number: int) -> list[str]:
    """The shared parts that a phase of the round trains."""
    training = run.federation.context
    phases = [phase for phase in training.phases if phase.runs_in(number)]
    changed = {name for phase in phases for name in phase.changes}
    return [name for name, part in training.parts.items() if part.scope is Scope.SHARED and name in changed]


def gaussian():
    """The noise that (ε, δ) asks for at a sensitivity of 2C, by the library."""
    return stats.norm(scale=2 * CLIP * dp_accounting.get_sigma_gaussian(EPSILON, DELTA))


def numbers(written: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """A change as the message has it, read with NumPy alone."""
    values = written[name].numpy().astype(np.float64)
    scale = written.get(f"{name}:scale")
    if scale is None:
        return values
    if values.ndim < 2:
        return values * float(scale)
    last = values.shape[-1] < values.shape[0]
    return values * (scale.numpy() if last else scale.numpy().reshape(-1, *[1] * (values.ndim - 1)))


def broadcasts(wire: Wire) -> dict[int, dict[str, torch.Tensor]]:
    """By round."""
    read = [read_message(message) for message in wire.down]
    return {json.loads(header["__metadata__"]["silotune"])["round"]: tensors for tensors, header in read}


def trained_minus_received(run: Run, wire: Wire, number: int, silo: str) -> dict[str, np.ndarray]:
    """By "part/tensor" name, from the local round's result and the broadcast that opened it."""
    opened = broadcasts(wire)[number]
    state = flatten({name: wire.results[number, silo].state[name] for name in sent_names(run, number)})
    return {name: (tensor.double() - opened[name].double()).numpy() for name, tensor in state.items()}


@every_pair
def test_a_message_holds_the_shared_parts_change_and_nothing_else(sent, method, uplink):
    run, wire = sent(method, uplink)
    shared = run.federation.coordinator.shared
    assert bool(wire.up) == bool(flatten(shared))
    assert "refused" not in (run.folder / "events.jsonl").read_text()
    for number, silo, message in wire.up:
        leaving = flatten({name: shared[name] for name in sent_names(run, number) if name in shared})
        shapes = {name: tuple(tensor.shape) for name, tensor in leaving.items()}
        written, header = read_message(message)
        fields = json.loads(header["__metadata__"]["silotune"])
        rows = sum(map(len, run.federation.silos[silo].train.values()))
        assert fields == {"round": number, "rows": rows, "silo": silo, "uplink": uplink}
        scales = {f"{name}:scale" for name in shapes} if uplink == "int8" else set()
        assert written.keys() == shapes.keys() | scales
        dtype = torch.int8 if uplink == "int8" else torch.float32
        assert all(written[name].dtype is dtype for name in shapes)
        assert {name: tuple(written[name].shape) for name in shapes} == shapes


@every_pair
def test_the_change_is_what_was_trained_rounded_or_noised(sent, method, uplink):
    """In round 1; later ones carry on what rounding left. Noise is in the message itself, of the stated scale."""
    run, wire = sent(method, uplink)
    norm, drawn = (1, stats.laplace(scale=2 * CLIP / EPSILON)) if uplink == "clip,laplace" else (2, gaussian())
    noise = []
    for silo, message in wire.updates(1).items():
        written, _ = read_message(message)
        change = trained_minus_received(run, wire, 1, silo)
        if uplink == "int8":
            for name, value in change.items():
                found = numbers(written, name)
                step = float(written[f"{name}:scale"].max())
                assert np.abs(found - value).max() <= step / 2 * (1 + 1e-5)
            continue
        values = np.concatenate([value.ravel() for value in change.values()])
        factor = min(1, CLIP / max(np.linalg.norm(values, norm), CLIP))
        noise.append(np.concatenate([numbers(written, name).ravel() for name in change]) - factor * values)
    if noise:  # of all silos together: of some 200 vectors tested one by one, one is soon as unlikely as this
        drawings = np.concatenate(noise)
        assert stats.kstest(drawings, drawn.cdf).pvalue > 1e-4
        absolute = drawn.expect(np.abs)
        spread = math.sqrt(drawn.var() - absolute**2)  # of |noise|
        assert np.abs(drawings).mean() == pytest.approx(absolute, abs=5 * spread / math.sqrt(len(drawings)))


@every_pair
def test_the_coordinator_adds_the_mean_of_the_changes_and_no_noise(sent, method, uplink):
    run, wire = sent(method, uplink)
    if not wire.up or not CASES[method].adopts_the_mean:
        return
    opened, leaving = broadcasts(wire), sent_names(run, 1)
    updates = [read_message(message)[0] for message in wire.updates(1).values()]
    for name, before in opened[1].items():
        if name.split("/")[0] not in leaving:
            assert torch.equal(opened[2][name], before)
            continue
        expected = before.double().numpy() + np.mean([numbers(written, name) for written in updates], axis=0)
        np.testing.assert_allclose(opened[2][name].double().numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("method", "uplink"), [*PAIRS, *OTHER_CODECS])
def test_other_order_and_a_resume_give_the_same_bits(federate, sent, method, uplink, tmp_path, monkeypatch):
    """Silos run backwards, interrupted in round 2 after the first silo, and resumed."""
    run, _ = sent(method, uplink)
    choose = Coordinator.choose
    monkeypatch.setattr(Coordinator, "choose", lambda self, number, silos: choose(self, number, silos)[::-1])

    def interrupt(number: int, what: str, done: int, total: int) -> None:
        if number == 2 and done == total - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federate.run(method, tmp_path / "run", *words(method, uplink), progress=interrupt)
    again = federate.run(method, tmp_path / "run", *words(method, uplink), resume=True)
    assert same(again.summary) == same(run.summary)
    assert again.summary.get("privacy") == run.summary.get("privacy")


def test_what_rounding_left_is_the_silos_memory(sent, federate, tmp_path):
    """In its checkpoints and its digest; without feedback the next round says something else."""
    run, wire = sent("fedmcp", "int8")
    for silo in run.federation.silos.values():
        assert silo.state is not None
        kept = {name for name in silo.state.memory if name.startswith("uplink/")}
        assert kept == {f"uplink/{name}" for name in flatten(run.federation.coordinator.shared)}
        before = digest(silo.state.flat())
        changed = silo.state.flat() | {f"memory/{min(kept)}": torch.ones(3)}
        assert digest(changed) != before
    with tapped() as other:
        federate.run("fedmcp", tmp_path / "run", "uplink=int8", "uplink.feedback=false")
    assert other.updates(1) == wire.updates(1)
    assert all(other.updates(2)[silo] != message for silo, message in wire.updates(2).items())
