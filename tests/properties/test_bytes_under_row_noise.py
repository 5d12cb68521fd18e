"""Noise on rows, over all methods: with one run's noised sums put into another, no byte that leaves differs.

The second run has another row in one place: other text, other label. So all that a silo sends depends on its rows
through noised sums alone, over rounds, private parts, memory and the choice of a round. Terms of a loss without rows
are each run's own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from silotune.communication.privacy.noise import NoiseStream
from silotune.core.tensors import State, Tensors, flatten
from silotune.data.batching import make_batch
from silotune.data.loading import draw_labeled_rows, load_silos
from silotune.data.row_folder import write_rows
from silotune.errors import InputError
from silotune.methods import METHODS, Phase, Step, mean_over_rows
from silotune.methods.ditto import Ditto
from silotune.methods.step import AT_WORK, LocalTraining, local_training
from silotune.models.tuners import TUNERS
from silotune.runs.build import plan_row_noise as build
from silotune.runs.build.builder import build as build_run
from silotune.runs.build.plan_row_noise import leaving_parts, noised_phases
from silotune.runs.build.resolve import read_config
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.release import upper_epsilon
from silotune.runs.run import run
from silotune.training import noised_steps
from silotune.training.client import SiloClient, SiloReply
from silotune.training.federation import Federation
from silotune.training.noised_steps import NoisedSteps
from silotune.training.row_privacy import RowPrivacy
from silotune.training.silo import Silo
from tests.support.proof import double_backbone, in_double
from tests.support.tiny import ONE_TASK, tiny_overrides, write_data

REFUSED = {
    "fedavg-full": "tuner",
    "fedmcp": "couples",
    "fedproto": "statistics of rows",
    "fedfame": "labeled rows from the silos",
    "server-only": "labeled rows from the silos",
    "fedavg-server": "labeled rows from the silos",
    "ifca": "aggregation=ifca reads a number of silos' rows",
}
"""Methods that noise on rows refuses, with words of the reason; the others have a run."""

WORDS = {"fedmcp": ("method.mu=0",), "fdlora": ("method.sync=1",), "fedfame": ("server.labels_per_class=5",)}
NOISE = ("privacy.unit=row", "privacy.epsilon=4", "rounds=2", "train.steps=2", "train.batch_size=10")
MISSED = ("rounds=4", "train.steps=1", "sampling.count=2", "data.tasks=[alpha,beta,gamma]")
"""Four rounds, of which every silo misses some."""
SHORT = ("scaffold", "ditto", "fedmcp", "feddpa-t")
"""Methods of `make test`: server state, a phase without noise, one phase of all parts, a phase of its own."""
ACCEPTED = [name for name in METHODS if name not in REFUSED or name in WORDS]


def with_units(data: Path, to: Path, more: int = 0) -> Path:
    """Copy the data with a column of units of two rows; one unit has `more` rows, which are long."""
    shutil.copytree(data, to)
    for path in to.glob("*/train.jsonl"):
        rows = [json.loads(line) | {"who": f"p{n // 2}"} for n, line in enumerate(path.read_text().splitlines())]
        rows += [rows[3] | {"sentence1": "once more " * 30}] * (more if path.parent.name == "alpha" else 0)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return to


def words(method: str, backbone: Path, data: Path) -> list[str]:
    """Two silos: a gradient of each row is what takes time here."""
    silos = () if method in ONE_TASK else ("data.tasks=[alpha,beta]",)
    return [*tiny_overrides(method, backbone, data), *silos, *NOISE, *WORDS.get(method, ())]


def with_another_row(data: Path, to: Path) -> Path:
    """Copy the data with one training row of the first task changed, its text and its label."""
    shutil.copytree(data, to)
    path = to / "alpha" / "train.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    row = json.loads(lines[3])
    row["sentence1"], row["label"] = f"never again {row['sentence1']} " * 3, 1 - row["label"]
    lines[3] = json.dumps(row) + "\n"
    path.write_text("".join(lines))
    return to


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many as the two steps of a round need."""
    return write_data(tmp_path_factory.mktemp("few"), rows={"train": 20, "validation": 6, "test": 6})


@pytest.fixture(scope="module")
def changed_data(few_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_another_row(few_rows, tmp_path_factory.mktemp("changed") / "data")


@dataclass
class Watched:
    """A run's messages, and what every noised step was made of."""

    sent: list[tuple[str, bytes]] = field(default_factory=list)
    noised: list[Tensors] = field(default_factory=list)
    """The noised sum of each step and tensor."""
    mechanisms: list[tuple[str, str, float, float]] = field(default_factory=list)
    """Silo, phase, rate of drawn units, and deviation of the noise."""
    clipped: list[Tensor] = field(default_factory=list)
    """Per sum of units, their clipped gradients, shape (units, numbers)."""


def watch(
    words: list[str], backbone: Path, out: Path, instead: Watched | None = None, spoil: str | None = None
) -> Watched:
    """Run in float64 with draws that do not depend on rows.

    Args:
        words: of the configuration.
        backbone: its folder.
        out: the run's folder.
        instead: a run whose noised sums are put in.
        spoil: what happens to a unit of each silo: `empty` takes its rows away, `nan` makes its gradient not finite.
    """
    found = Watched()
    rounds, noise, total_of = SiloClient.rounds, NoisedSteps._noised, noised_steps.clipped_sum
    units, gradients = noised_steps.units_of, NoisedSteps._row_gradients

    def emptied(silo: Silo) -> list[Any]:
        return [[] if index == 3 and spoil == "empty" else unit for index, unit in enumerate(units(silo))]

    def spoiled(self: NoisedSteps, number: int, first: int, places: Any, *args: Any) -> Any:
        found_gradients, *rest = gradients(self, number, first, places, *args)
        for index, (_, row) in enumerate(places):
            if row == 3 and spoil == "nan":
                found_gradients[0][index].fill_(float("nan"))
        return found_gradients, *rest

    def sent(self: SiloClient, *args: Any) -> list[SiloReply]:
        replies = rounds(self, *args)
        found.sent.extend((reply.silo, reply.message) for reply in replies)
        return replies

    def noised(self: NoisedSteps, number: int, total: Tensors, deviation: float, grid: float) -> Tensors:
        found.mechanisms.append((self._silo.name, self.phase.name, self._rate, deviation))
        own = noise(self, number, total, deviation, grid)
        found.noised.append(own if instead is None else instead.noised[len(found.noised)])
        for tensor in total.values():
            tensor.zero_()
        return found.noised[-1]

    def clipped(vectors: Tensor, bound: float, grid: float) -> Tensor:
        found.clipped.append(grid * torch.stack([total_of(vector[None], bound, grid) for vector in vectors]).double())
        return total_of(vectors, bound, grid)

    with in_double(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SiloClient, "rounds", sent)
        patch.setattr(NoisedSteps, "_noised", noised)
        patch.setattr(noised_steps, "clipped_sum", clipped)
        patch.setattr(noised_steps, "units_of", emptied)
        patch.setattr(NoisedSteps, "_row_gradients", spoiled)
        patch.setattr(
            RowPrivacy, "stream", lambda self, silo, number, *_: NoiseStream(f"{silo.name} {number}".encode())
        )
        run(read_config("demo", words), out=out, backbone=double_backbone(backbone, "AutoModel"))
    return found


def contrasted(method: str, backbone: Path, data: Path, changed: Path, out: Path) -> int:
    """Compare a run with one over other data that has its noised sums; see `compare`."""
    more = []
    if method == "fedfame":  # the coordinator's own rows, which are no silo's
        config = read_config("demo", tiny_overrides(method, backbone, data))
        write_rows(out / "own", draw_labeled_rows(load_silos(config), config.server, 1))
        more = [f"federation.labelled={out / 'own'}"]
    first = watch([*words(method, backbone, data), *more], backbone, out / "one")
    return compare(first, watch([*words(method, backbone, changed), *more], backbone, out / "two", first))


@pytest.mark.parametrize(
    "method", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in ACCEPTED]
)
def test_what_leaves_depends_on_rows_through_noised_gradients_alone(
    method, small_backbone, few_rows, changed_data, tmp_path
):
    changed = contrasted(method, small_backbone, few_rows, changed_data, tmp_path)
    assert changed or method in ("local", "centralised"), "the changed row was drawn"


@pytest.mark.parametrize(
    "tuner",
    [
        pytest.param(name, marks=() if name in ("vera", "fed-sb", "prefix") else pytest.mark.long)
        for name in TUNERS.built_in
        if name not in ("full", "p-tuning")
    ],
)
def test_every_tuner_takes_noise(tuner, small_backbone, few_rows, tmp_path):
    """A method whose tuner keeps something while a phase runs would be refused."""
    own = {"ravan": ("method=ravan",), "vera": ("tuner.r=4",)}.get(tuner, ())
    more = (f"tuner={tuner}", "method.adapters=1", "rounds=1", "train.steps=1", *own)
    found = watch([*words("fedavg", small_backbone, few_rows), *more], small_backbone, tmp_path / "run")
    assert found.sent
    assert any(tensor.abs().max() > 0 for each in found.noised for tensor in each.values())


def compare(first: Watched, second: Watched) -> int:
    """Check that two runs differ in one unit's contributions alone; returns in how many sums they do."""
    assert first.mechanisms == second.mechanisms
    assert len(first.clipped) == len(second.clipped)
    changed = 0
    for one, two in zip(first.clipped, second.clipped, strict=True):
        assert (two.norm(dim=1) <= 1).all()
        different = int((one != two).any(1).sum())
        assert different <= 1, "one unit is another one, and no other moves by a bit"
        changed += different
    assert first.sent == second.sent
    assert first.sent
    return changed


OWN_PARTS = ("ditto", "fedlora", "feddpa-t", "fdlora")
"""Methods with parts or final phases that have no noise, unless all have."""

EVERYTHING = {"feddpa-t": ("method.weighting=fixed",), "fdlora": ("method.sync=1",)}


@pytest.mark.parametrize(
    "method", [OWN_PARTS[0], *(pytest.param(name, marks=pytest.mark.long) for name in OWN_PARTS[1:])]
)
def test_with_noise_on_all_parts_a_silos_model_has_the_same_bits(
    method, small_backbone, few_rows, changed_data, tmp_path
):
    backbone, more = small_backbone, (*EVERYTHING.get(method, ()), "privacy.parts=all", "train.steps=1")
    first = watch([*words(method, backbone, few_rows), *more], backbone, tmp_path / "one")
    assert compare(first, watch([*words(method, backbone, changed_data), *more], backbone, tmp_path / "two", first))
    files = [sorted((tmp_path / run / "models").rglob("*.*")) for run in ("one", "two")]
    assert len(files[0]) > 3
    for one, two in zip(*files, strict=True):
        assert one.read_bytes() == two.read_bytes(), one
    federation = build_run(read_config(str(tmp_path / "one" / "config.yaml")))
    context, plans = federation.context, federation.context.row_privacy.plans
    for name, silo in federation.silos.items():
        of_rounds, final = (
            sum(context.steps(silo, phase) for phase in context.phases if phase.trains and phase.when == when)
            for when in ("round", "end")
        )
        once = of_rounds if method != "fdlora" else of_rounds // 2  # its first phase has round 1, its second the others
        assert plans[name].steps == (0, once, 2 * once, 2 * once + final)
    total = federation.privacy.summary()["epsilon_total"]
    assert total <= 4
    assert upper_epsilon(federation, 1e-5) == pytest.approx(total), "the model's ε is the run's"


def test_a_unit_without_rows_or_without_a_finite_gradient(small_backbone, few_rows, tmp_path):
    """Over four rounds, of which every silo misses some."""
    backbone = small_backbone
    given = [*words("fedper", backbone, few_rows), *MISSED]
    first = watch(given, backbone, tmp_path / "one")
    for spoil in ("nan", "empty"):
        assert compare(first, watch(given, backbone, tmp_path / spoil, first, spoil))


def test_a_unit_of_other_rows_and_of_more(small_backbone, few_rows, tmp_path):
    backbone, data = small_backbone, [with_units(few_rows, tmp_path / f"d{n}", n) for n in (0, 3)]
    given = [[*words("fedavg", backbone, path), *MISSED, "privacy.unit=who"] for path in data]
    first = watch(given[0], backbone, tmp_path / "one")
    assert compare(first, watch(given[1], backbone, tmp_path / "two", first))


@pytest.mark.parametrize("method", REFUSED)
def test_what_it_cannot_cover_is_refused(method, small_backbone, few_rows, tmp_path):
    given = [*tiny_overrides(method, small_backbone, few_rows), *NOISE]
    with pytest.raises(InputError, match=f"privacy.unit.*{REFUSED[method]}"):
        run(read_config("demo", given), out=tmp_path / "run")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_shorter_precisions_are_refused_by_name(precision, small_backbone, few_rows):
    given = [*tiny_overrides("fedavg", small_backbone, few_rows), *NOISE, f"precision={precision}"]
    with pytest.raises(InputError, match=f"precision: in {precision} a row's gradient .*; allowed: fp32, auto"):
        read_config("demo", given)


@pytest.mark.parametrize(
    "method", [name if name in ("moon", "fedfame") else pytest.param(name, marks=pytest.mark.long) for name in METHODS]
)
def test_a_loss_that_is_marked_is_the_mean_of_its_rows(method, tiny_federation):
    """At parts, received parts and parts of the last round that differ."""
    federation = tiny_federation(method, *WORDS.get(method, ()), "precision=fp32")
    context, silo = federation.context, next(iter(federation.silos.values()))
    draw = torch.Generator().manual_seed(0)

    def moved(state: State) -> State:
        return {
            part: {name: each + 0.1 * torch.randn(each.shape, generator=draw) for name, each in tensors.items()}
            for part, tensors in state.items()
        }

    shared = federation.coordinator.shared
    state, received, last = (moved(context.model_state(silo, shared)) for _ in range(3))
    memory = flatten({"previous": flatten({name: last[name] for name in context.method.remembers})})
    phases = [phase for phase in (*context.phases, *context.server_phases) if phase.trains and phase.by_row]
    rates = {phase.name: 0.1 for phase in phases}
    assert phases

    def loss(phase: Phase, chosen: list[int]) -> Tensor:
        owner = federation.server if phase in context.server_phases else silo
        rows = next(iter(owner.train.values()))
        batch = make_batch(rows, rows.sequences(chosen), context.backbone.pad_id)
        mixes = {name: context.resolve(mix, state, received, memory) for name, mix in phase.views.items()}
        views = context.program([mixes])(batch)
        return phase.loss(Step(batch, views, state, received, memory, context.parts))

    for phase in phases:
        with torch.no_grad(), local_training(LocalTraining(0.1, dict.fromkeys(rates, 1), rates)):
            alone = torch.stack([loss(phase, [row]) for row in range(6)])
            assert alone.std() > 0
            torch.testing.assert_close(loss(phase, [*range(6)]), alone.mean())


ALL_REFUSES = {
    "feddpa-t": ((), "^privacy.parts: the model of method feddpa-t holds vectors of rows"),
    "fedproto": ((), "statistics of rows"),
    "ditto": (("evaluation.new_silos=[gamma]",), "evaluation.new_silos: they train after"),
    "fedavg": (("train.early_stopping=1",), "train.early_stopping: scores without noise"),
    "local": (("privacy.unit=null", "privacy.epsilon=null"), "privacy.parts: all is about noise on rows"),
}


@pytest.mark.parametrize("method", ALL_REFUSES)
def test_what_noise_on_all_parts_refuses(method, small_backbone, few_rows):
    more, reason = ALL_REFUSES[method]
    given = [*tiny_overrides(method, small_backbone, few_rows), *NOISE, "privacy.parts=all", *more]
    with pytest.raises(InputError, match=reason):
        build_run(read_config("demo", given))


# -- leaks that the test above has to find -----------------------------------------------------------------------------


def test_a_phase_without_noise(monkeypatch, small_backbone, few_rows, changed_data, tmp_path):
    """FedRep's head, which is private, trains without noise, and the shared body follows it."""
    real = build.noised_phases
    monkeypatch.setattr(build, "noised_phases", lambda *args: real(*args) - {"head"})
    with pytest.raises(AssertionError):
        contrasted("fedrep", small_backbone, few_rows, changed_data, tmp_path)


def test_a_clip_norm_over_a_part_without_noise(monkeypatch, backbone_folder, data_folder, tmp_path):
    """Ditto's private part, which trains without noise, changes how the gradients of the shared one are scaled."""
    real = NoisedSteps._row_gradients

    def scaled(self: NoisedSteps, number: int, first: int, places: Any, state: State, *args: Any) -> Any:
        found, *rest = real(self, number, first, places, state, *args)
        size = sum(float(tensor.norm()) for tensor in state["private"].values())
        return [gradient / size for gradient in found], *rest

    monkeypatch.setattr(NoisedSteps, "_row_gradients", scaled)
    monkeypatch.setattr(RowPrivacy, "seen_by", lambda self, phase, *everything: everything)
    monkeypatch.setattr(f"{__name__}.NOISE", (*NOISE, "train.batch_size=30"))
    changed = with_another_row(data_folder, tmp_path / "changed")
    with pytest.raises(AssertionError):
        contrasted("ditto", backbone_folder("bert"), data_folder, changed, tmp_path)


def test_a_term_without_rows_that_reads_a_part_without_noise(
    monkeypatch, small_backbone, few_rows, changed_data, tmp_path
):
    """Ditto's private part of the last round pulls at the shared one."""
    ditto_that_reads(monkeypatch, READS["memory"])
    monkeypatch.setattr(build, "leaving_parts", lambda *args: frozenset({"global", "head_global"}))
    monkeypatch.setattr(RowPrivacy, "seen_by", lambda self, phase, *everything: everything)
    with pytest.raises(AssertionError):
        contrasted("ditto", small_backbone, few_rows, changed_data, tmp_path)


def test_a_part_that_another_one_follows_after_a_batch(tiny_federation: Callable) -> None:
    """FedDPA-T's local part trains without noise, until the shared one reads it."""
    federation = tiny_federation("feddpa-t")
    context = federation.context
    assert phases_with_noise(federation) == {"global"}
    follows = {"global": lambda state: {**state["private"], **state["global"]}}
    context.phases = [replace(p, then=follows) if p.name == "global" else p for p in context.phases]
    assert phases_with_noise(federation) == {"global", "local"}


def phases_with_noise(federation: Federation, every: bool = False) -> frozenset[str]:
    context = federation.context
    return noised_phases(context, leaving_parts(context, next(iter(federation.silos.values())), every), every)


def size(tensors: Mapping[str, Tensor]) -> Tensor:
    return sum((tensor.square().sum() for tensor in tensors.values()), torch.zeros(()))


READS: dict[str, Callable[[Step], Tensor]] = {
    "index": lambda step: size(step.state["private"]),
    "get": lambda step: size(step.state.get("private", {})),
    "items": lambda step: sum(size(tensors) for part, tensors in step.state.items() if part == "private"),
    "values": lambda step: sum(map(size, step.state.values())),
    "copy": lambda step: size(step.state.copy()["private"]),
    "**": lambda step: size({**step.state}["private"]),
    "|": lambda step: size((step.state | {})["private"]),
    "| from the right": lambda step: size(({} | step.state)["private"]),
    "memory": lambda step: size({key: step.memory[key] for key in step.memory if key.startswith("previous/private/")}),
    "memory's items": lambda step: size({key: each for key, each in step.memory.items() if "/private/" in key}),
    "previous": lambda step: size(step.previous("private")),
}
"""Ways in which a loss of Ditto's global phase may read the private part, which trains without noise."""


def ditto_that_reads(monkeypatch: pytest.MonkeyPatch, read: Callable[[Step], Tensor]) -> None:
    """Add a read without rows to Ditto's global loss, and the private part to its memory."""

    @mean_over_rows
    def loss(self: Ditto, step: Step) -> Tensor:
        return step.cross_entropy("global", "head_global") + step.without_rows(
            0.1 * read(step) * size(step.state["global"])
        )

    monkeypatch.setattr(Ditto, "global_loss", loss)
    monkeypatch.setattr(Ditto, "remembers", ("private",))


@pytest.mark.parametrize("way", READS)
def test_a_read_of_a_part_without_noise(way, monkeypatch, tiny_federation):
    ditto_that_reads(monkeypatch, READS[way])
    federation = tiny_federation("ditto")
    assert phases_with_noise(federation) == {"global", "personal"}


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.long) for way in ("items", "memory")])
def test_what_such_a_method_sends(way, monkeypatch, small_backbone, few_rows, changed_data, tmp_path):
    ditto_that_reads(monkeypatch, READS[way])
    assert contrasted("ditto", small_backbone, few_rows, changed_data, tmp_path)


def test_what_a_phase_is_given_that_changes_what_leaves(monkeypatch, small_backbone, few_rows, tmp_path):
    """Even a read that the trial does not meet finds nothing without noise."""
    given: set[str] = set()

    def read(step: Step) -> Tensor:
        if type(step.state) is dict:  # the run, not the trial
            given.update(step.state, step.memory, AT_WORK.get().steps)
        return torch.zeros(())

    ditto_that_reads(monkeypatch, read)
    watch(words("ditto", small_backbone, few_rows), small_backbone, tmp_path / "run")
    assert given == {"global", "head_global"}


def on_the_object(self: Ditto, loss: Tensor) -> None:
    self.seen = loss.detach()  # type: ignore[attr-defined]


def on_the_class(self: Ditto, loss: Tensor) -> None:
    type(self).seen = loss.detach()  # type: ignore[attr-defined]


def in_a_list(self: Ditto, loss: Tensor) -> None:
    self.options.__dict__.setdefault("seen", []).append(loss.item())


@pytest.mark.parametrize("keep", [on_the_object, on_the_class, in_a_list])
def test_a_method_that_keeps_something_of_rows(keep, monkeypatch, small_backbone, few_rows, tmp_path):
    """Found in the trial; and in a run, if it begins later."""
    trial = [True]

    @mean_over_rows
    def loss(self: Ditto, step: Step) -> Tensor:
        value = step.cross_entropy("own", "head_private")
        if step.apart is None or trial[0]:
            keep(self, value)
        return value

    monkeypatch.setattr(Ditto, "personal_loss", loss)
    monkeypatch.setattr(Ditto, "seen", None, raising=False)
    given = words("ditto", small_backbone, few_rows)
    for trial[0] in (True, False):
        with pytest.raises(InputError, match=r"^privacy.unit: method ditto keeps .* phase 'personal' runs"):
            run(read_config("demo", given), out=tmp_path / f"run{trial[0]}")


@pytest.mark.parametrize(("words_of_noise", "best"), [((), 2), (("privacy.unit=null", "privacy.epsilon=null"), 1)])
def test_a_best_round_by_raw_scores(words_of_noise, best, monkeypatch, small_backbone, few_rows, tmp_path):
    """Scores that prefer round 1 are followed without noise alone."""
    monkeypatch.setattr(InProcessEngine, "validate", lambda self, number: {"alpha": 9.0 - number})
    given = [*words("fedavg", small_backbone, few_rows), *words_of_noise]
    assert run(read_config("demo", given), out=tmp_path / "run").summary["best_round"] == best
