"""Measure how much a silo's finished model reveals about its training rows (`silotune release`)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from silotune.communication.privacy.budget import DELTA
from silotune.communication.privacy.row_accountant import row_epsilon
from silotune.core.files import write_text
from silotune.core.tensors import State
from silotune.errors import InputError, unknown_name_error
from silotune.evaluation.release import ALARMS, Audit, Membership, audit, membership, row_losses, verbatim
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.model_file import model_folder
from silotune.runs.personal_model import PersonalModel
from silotune.training.federation import Federation
from silotune.training.prediction import PredictionContext
from silotune.training.silo import Silo

RELEASE_FILE = "release.json"

MOST_ROWS = 500
"""Training rows, and test rows, whose losses are compared."""

MOST_ANSWERS = 100


@dataclass(frozen=True)
class Release:
    """What was measured of a model.

    Args:
        silo: the silo's name.
        unit: whom noise protects; None without noise on rows.
        upper: ε of the model's tensors by the account of their noise; infinite if any was trained without.
        delta: δ of that account.
        canaries: the audit; None without canaries.
        members: membership inference by loss.
        repeated: of how many training prompts, and of how many test prompts, the answer came out word for word, with
            both numbers of prompts; None where no text is written.
    """

    silo: str
    unit: str | None
    upper: float
    delta: float
    canaries: Audit | None
    members: Membership
    repeated: tuple[int, int, int, int] | None

    @classmethod
    def read(cls, path: Path) -> Release:
        """Read a file written by `write`."""
        tree = json.loads(path.read_text(encoding="utf-8"))
        canaries = None if tree["canaries"] is None else Audit(**tree["canaries"])
        repeated = None if tree["repeated"] is None else tuple(tree["repeated"])
        members = Membership(**tree["members"])
        upper = math.inf if tree["upper"] is None else tree["upper"]
        return cls(**{**tree, "canaries": canaries, "members": members, "repeated": repeated, "upper": upper})

    def fields(self) -> dict[str, Any]:
        """Return the numbers as JSON has them: null for an ε without a bound."""
        return asdict(self) | {"upper": None if math.isinf(self.upper) else self.upper}

    def write(self, folder: Path) -> None:
        """Write the numbers into a run's folder at a silo."""
        write_text(folder / RELEASE_FILE, json.dumps(self.fields(), indent=1))

    def lines(self) -> Iterator[str]:
        """Yield the page's lines."""
        upper = "∞: some of its tensors were trained without noise on rows" if math.isinf(self.upper) else None
        bound = upper or f"{self.upper:.3g} at δ = {self.delta:g} for each {self.unit}"
        yield f"model of silo {self.silo!r}"
        yield f"ε by the account of its noise: {bound}"
        if self.canaries is None:
            yield "ε at least: not measured, the run had no canaries (audit.canaries)"
        else:
            found = self.canaries
            yield (
                f"ε at least: {found.lower:.3g} (95 %), by {found.right} of {found.canaries} coins guessed; all right "
                f"would have shown {found.most:.3g}"
            )
        low, high = self.members.interval
        yield (
            f"membership by loss: AUC {self.members.auc:.2f} (0.5 is guessing); {self.members.found:.0%} of the "
            f"training rows found ({low:.0%} to {high:.0%}) at {ALARMS:.0%} false alarms; {self.members.rows[0]} "
            f"training and {self.members.rows[1]} other rows"
        )
        if self.repeated is not None:
            own, prompts, other, others = self.repeated
            yield f"word for word: {own} of {prompts} training answers, {other} of {others} test answers"
        yield self.sentence

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if self.canaries is not None and self.canaries.lower > self.upper:
            return "These measurements contradict the account: do not give the model away, and report the fault."
        if math.isinf(self.upper):
            return "Nothing bounds what this model tells about a training row; better attacks than these exist."
        return f"By its account the model tells of each {self.unit} at most what ε allows; no measure contradicts it."


def measure_release(run: Path, silo: str) -> Release:
    """Measure a silo's model of a run in one process, whose rows are still where they were.

    Args:
        run: the run's folder, or a run's folder at a silo, whose worker has measured its model (`release.json`).
        silo: the silo's name.
    """
    if (kept := run / RELEASE_FILE).is_file():
        return Release.read(kept)
    config_file = run / "config.yaml"
    if not config_file.is_file():
        raise InputError(f"{run}: no run folder (config.yaml is missing)")
    folder = model_folder(run, silo)
    federation = build(read_config(str(config_file)))
    if silo not in federation.silos:
        raise unknown_name_error("silo", silo, federation.silos)
    model = PersonalModel.open(folder, federation.backbone)
    return measure(federation, federation.silos[silo], model.context, model.state)


def measure(federation: Federation, silo: Silo, context: PredictionContext, state: State) -> Release:
    """Measure a silo's model."""
    (rows,), (evaluation,) = silo.train.values(), silo.evaluations.values()
    delta, own = federation.config.privacy.delta or DELTA, rows.examples
    found = None
    if silo.canaries is not None:
        canaries, present = silo.canaries
        own -= sum(present)
        found = audit(row_losses(context, state, canaries), present, delta)
    sets = (rows, min(own, MOST_ROWS)), (evaluation.test, min(evaluation.test.examples, MOST_ROWS))
    repeated = None
    if rows.task.kind == "generation" and not rows.pairs:
        first = [min(count, MOST_ANSWERS) for _, count in sets]
        hits = [verbatim(context, state, part, count) for (part, _), count in zip(sets, first, strict=True)]
        repeated = hits[0], first[0], hits[1], first[1]
    return Release(
        silo.name,
        federation.config.privacy.unit,
        upper_epsilon(federation, delta),
        delta,
        found,
        membership(*(row_losses(context, state, part, count) for part, count in sets)),
        repeated,
    )


def upper_epsilon(federation: Federation, delta: float) -> float:
    """Return the ε of a silo's model by the account of its noise; infinite if a phase on rows has none.

    The model's folder holds all parts, and those of the method's learned weights are no names in its mix.
    """
    context, noise = federation.context, federation.context.row_privacy
    if noise is None or context.prediction.weighting is not None:  # the model's folder then holds vectors of rows
        return math.inf
    if any((phase.trains or phase.gathers) and not noise.covers(phase) for phase in context.phases):
        return math.inf
    plans = noise.plans.values()  # of all silos, whose units the shared parts tell of
    return max(row_epsilon(each.multiplier, delta, each.rate, each.steps[-1]) for each in plans)
