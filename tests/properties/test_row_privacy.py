"""Noise on rows, over all methods: with one run's noised gradients put into another, no byte that leaves differs.

The second run has another row in one place: other text, other label. So all that a silo sends depends on its rows
through noised gradients alone, over rounds, private parts, memory and the choice of a round.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from silotune.communication.privacy.noise import NoiseStream
from silotune.core.tensors import State
from silotune.errors import InputError
from silotune.methods import METHODS
from silotune.runs.build.resolve import read_config
from silotune.runs.build.row_privacy import noised_phases
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.run import run
from silotune.training import private_steps
from silotune.training.client import SiloClient, SiloReply
from silotune.training.private_steps import PrivateGradient, PrivateSteps
from silotune.training.row_privacy import RowPrivacy
from silotune.training.silo import Silo
from tests.support.proof import double_backbone, in_double
from tests.support.tiny import tiny_overrides

REFUSED = {
    "fedavg-full": "tuner",
    "moon": "couples",
    "fedmcp": "couples",
    "fedproto": "statistics of rows",
    "fedfame": "labeled rows",
    "server-only": "labeled rows",
}
"""Methods that noise on rows refuses, with words of the reason; the others have a run."""

WORDS = {"fedmcp": ("method.mu=0",), "fdlora": ("method.sync=1",)}
NOISE = ("privacy.unit=row", "privacy.epsilon=4", "rounds=2", "train.steps=2", "train.batch_size=30")
MISSED = ("rounds=4", "train.steps=1", "sampling.count=2")
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
    return [*tiny_overrides(method, backbone, data), *NOISE, *WORDS.get(method, ())]


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
def changed_data(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_another_row(data_folder, tmp_path_factory.mktemp("changed") / "data")


@dataclass
class Watched:
    """A run's messages, and what every noised step was made of."""

    sent: list[tuple[str, bytes]] = field(default_factory=list)
    noised: list[PrivateGradient] = field(default_factory=list)
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
        instead: a run whose noised gradients are put in.
        spoil: what happens to a unit of each silo: `empty` takes its rows away, `nan` makes its gradient not finite.
    """
    found = Watched()
    rounds, step, sums = SiloClient.rounds, PrivateSteps.step, private_steps.clipped_sums
    units, gradients = private_steps.units_of, PrivateSteps._row_gradients

    def emptied(silo: Silo) -> list[Any]:
        return [[] if index == 3 and spoil == "empty" else unit for index, unit in enumerate(units(silo))]

    def spoiled(self: PrivateSteps, number: int, first: int, places: Any, *args: Any) -> Any:
        found_gradients, *rest = gradients(self, number, first, places, *args)
        for index, (_, row) in enumerate(places):
            if row == 3 and spoil == "nan":
                found_gradients[0][index].fill_(float("nan"))
        return found_gradients, *rest

    def sent(self: SiloClient, *args: Any) -> list[SiloReply]:
        replies = rounds(self, *args)
        found.sent.extend((reply.silo, reply.message) for reply in replies)
        return replies

    def noised(self: PrivateSteps, *args: Any) -> PrivateGradient:
        own = step(self, *args)
        deviation = self._privacy.deviation(self._silo.name)
        found.mechanisms.append((self._silo.name, self.phase.name, self._rate, deviation))
        found.noised.append(own if instead is None else instead.noised[len(found.noised)])
        return found.noised[-1]

    def clipped(gradients: list[Tensor], bound: float) -> list[Tensor]:
        flat = torch.cat([each.reshape(len(each), -1) for each in gradients], 1)
        found.clipped.append(torch.stack([torch.cat([*clipped_row(row, bound)]) for row in flat]))
        return sums(gradients, bound)

    def clipped_row(row: Tensor, bound: float) -> list[Tensor]:
        return [each.reshape(-1) for each in sums([row[None]], bound)]

    with in_double(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SiloClient, "rounds", sent)
        patch.setattr(PrivateSteps, "step", noised)
        patch.setattr(private_steps, "clipped_sums", clipped)
        patch.setattr(private_steps, "units_of", emptied)
        patch.setattr(PrivateSteps, "_row_gradients", spoiled)
        patch.setattr(
            RowPrivacy, "stream", lambda self, silo, number, *_: NoiseStream(f"{silo.name} {number}".encode())
        )
        run(read_config("demo", words), out=out, backbone=double_backbone(backbone, "AutoModel"))
    return found


def contrasted(method: str, backbone: Path, data: Path, changed: Path, out: Path) -> int:
    """Compare a run with one over other data that has its noised gradients; see `compare`."""
    first = watch(words(method, backbone, data), backbone, out / "one")
    return compare(first, watch(words(method, backbone, changed), backbone, out / "two", first))


@pytest.mark.parametrize(
    "method", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in ACCEPTED]
)
def test_what_leaves_depends_on_rows_through_noised_gradients_alone(
    method, backbone_folder, data_folder, changed_data, tmp_path
):
    changed = contrasted(method, backbone_folder("bert"), data_folder, changed_data, tmp_path)
    assert changed or method in ("local", "centralised"), "the changed row was drawn"


def compare(first: Watched, second: Watched) -> int:
    """Check that two runs differ in one unit's contributions alone; returns in how many sums they do."""
    assert first.mechanisms == second.mechanisms
    assert len(first.clipped) == len(second.clipped)
    changed = 0
    for one, two in zip(first.clipped, second.clipped, strict=True):
        assert (two.norm(dim=1) <= 1 + 1e-9).all()
        apart = torch.cdist(one, two, p=float("inf")) > 1e-10
        different = int(apart.all(1).sum()), int(apart.all(0).sum())
        assert max(different) <= 1, "one unit is another one"
        changed += max(different)
    assert first.sent == second.sent
    assert first.sent
    return changed


def test_a_unit_without_rows_or_without_a_finite_gradient(backbone_folder, data_folder, tmp_path):
    """Over four rounds, of which every silo misses some."""
    backbone = backbone_folder("bert")
    given = [*words("fedper", backbone, data_folder), *MISSED]
    first = watch(given, backbone, tmp_path / "one")
    for spoil in ("nan", "empty"):
        assert compare(first, watch(given, backbone, tmp_path / spoil, first, spoil))


def test_a_unit_of_other_rows_and_of_more(backbone_folder, data_folder, tmp_path):
    backbone, data = backbone_folder("bert"), [with_units(data_folder, tmp_path / f"d{n}", n) for n in (0, 3)]
    given = [[*words("fedavg", backbone, path), *MISSED, "privacy.unit=who"] for path in data]
    first = watch(given[0], backbone, tmp_path / "one")
    assert compare(first, watch(given[1], backbone, tmp_path / "two", first))


@pytest.mark.parametrize("method", REFUSED)
def test_what_it_cannot_cover_is_refused(method, backbone_folder, data_folder, tmp_path):
    given = [*tiny_overrides(method, backbone_folder("bert"), data_folder), *NOISE]
    with pytest.raises(InputError, match=f"privacy.unit.*{REFUSED[method]}"):
        run(read_config("demo", given), out=tmp_path / "run")


# -- leaks that the test above has to find -----------------------------------------------------------------------------


def test_a_phase_without_noise(monkeypatch, backbone_folder, data_folder, changed_data, tmp_path):
    """FedRep's head, which is private, trains without noise, and the shared body follows it."""
    from silotune.runs.build import row_privacy as build

    real = build.noised_phases
    monkeypatch.setattr(build, "noised_phases", lambda *args: real(*args) - {"head"})
    with pytest.raises(AssertionError):
        contrasted("fedrep", backbone_folder("bert"), data_folder, changed_data, tmp_path)


def test_a_clip_norm_over_a_part_without_noise(monkeypatch, backbone_folder, data_folder, changed_data, tmp_path):
    """Ditto's private part, which trains without noise, changes how the gradients of the shared one are scaled."""
    real = PrivateSteps._row_gradients

    def scaled(self: PrivateSteps, number: int, first: int, places: Any, state: State, *args: Any) -> Any:
        found, *rest = real(self, number, first, places, state, *args)
        size = sum(float(tensor.norm()) for tensor in state["private"].values())
        return [gradient / size for gradient in found], *rest

    monkeypatch.setattr(PrivateSteps, "_row_gradients", scaled)
    with pytest.raises(AssertionError):
        contrasted("ditto", backbone_folder("bert"), data_folder, changed_data, tmp_path)


def test_a_part_that_another_one_follows_after_a_batch(tiny_federation: Callable) -> None:
    """FedDPA-T's local part trains without noise, until the shared one reads it."""
    federation = tiny_federation("feddpa-t")
    context, silo = federation.context, next(iter(federation.silos.values()))
    assert noised_phases(context, silo) == {"global"}
    follows = {"global": lambda state: {**state["private"], **state["global"]}}
    context.phases = [replace(p, then=follows) if p.name == "global" else p for p in context.phases]
    assert noised_phases(context, silo) == {"global", "local"}


@pytest.mark.parametrize(("words_of_noise", "best"), [((), 2), (("privacy.unit=null", "privacy.epsilon=null"), 1)])
def test_a_best_round_by_raw_scores(words_of_noise, best, monkeypatch, backbone_folder, data_folder, tmp_path):
    """Scores that prefer round 1 are followed without noise alone."""
    monkeypatch.setattr(InProcessEngine, "validate", lambda self, number: {"alpha": 9.0 - number})
    given = [*words("fedavg", backbone_folder("bert"), data_folder), *words_of_noise]
    assert run(read_config("demo", given), out=tmp_path / "run").summary["best_round"] == best
