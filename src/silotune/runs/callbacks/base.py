"""The base class of callbacks, which follow a run round by round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silotune.core.numeric import mean_ignoring_none
from silotune.methods.step import EVENT_KEYS

_BYTES = ("bytes_up", "bytes_down")


@dataclass(frozen=True)
class RoundEnd:
    """A round that has ended.

    Args:
        round: its number, from 1.
        rounds: how many rounds the run has.
        validation: silo → score on validation rows (percent, or a loss), None without rows; empty if the round was not
            judged.
        seconds: of the run so far, in this process and in those before it.
        events: the round's other events: `silo`, `server`, `final`, `refused` and so on, as in `events.jsonl`.
        replayed: the round ended before this process began, and is told again after a resume.
    """

    round: int
    rounds: int
    validation: Mapping[str, float | None]
    seconds: float
    events: tuple[Mapping[str, Any], ...]
    replayed: bool

    @property
    def mean(self) -> float | None:
        """The mean validation score over silos; None if none was judged."""
        return mean_ignoring_none(self.validation.values())

    @property
    def product_error(self) -> float | None:
        """The error of averaging LoRA's A and B (docs/federated-lora.md); None in a round that has none."""
        found = [event["product_error"] for event in self.events if event.get("event") == "aggregation"]
        return float(found[-1]) if found else None

    def scalars(self) -> dict[str, float]:
        """Return the round's numbers: `validation/SILO`, their mean, `loss/SILO`, loss terms and bytes by silo.

        Also `product_error/coordinator`, where there is one.
        """
        scalars = {f"validation/{silo}": float(score) for silo, score in self.validation.items() if score is not None}
        if len(scalars) > 1 and self.mean is not None:
            scalars["validation/mean over silos"] = self.mean
        for event in self.events:
            kind, party = event.get("event"), event.get("silo", "coordinator")
            if kind in ("silo", "server", "final"):
                suffix = " (final phases)" if kind == "final" else ""
                scalars |= {f"{term}{suffix}/{party}": value for term, value in logged_values(event).items()}
                scalars |= {f"{key}/{party}": float(event[key]) for key in _BYTES if key in event}
        if self.product_error is not None:
            scalars["product_error/coordinator"] = self.product_error
        return scalars


class Callback:
    """Follows a run; override what you need. An exception ends the run, which can be resumed.

    Calls come in this order: `on_start`; for each round `on_progress` and `on_silo` any number of times, then
    `on_round`; `on_end` if the run is finished; `close` in any case. After a resume, silos and rounds that ended before
    are told again first. A round is told when the next piece of work begins.
    """

    def on_start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Called before the first call of any other kind.

        Args:
            folder: the run folder.
            config: the run's `config.yaml`, by section.
        """

    def on_progress(self, round: int, what: str, done: int, total: int) -> None:
        """Called before every piece of work: `done` of the round's `total` silos are finished, `what` comes next."""

    def on_silo(self, round: int, silo: str, values: Mapping[str, Any]) -> None:
        """Called when a silo's local round has ended.

        Args:
            round: the round's number.
            silo: the silo's name.
            values: loss and its terms, seconds, rows and bytes, as far as the silo discloses them.
        """

    def on_round(self, ended: RoundEnd) -> None:
        """Called when a round has ended."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Called when the run is finished, with the content of `summary.json`."""

    def close(self) -> None:
        """Called once at last, also after an error or an interruption; after it, no call follows."""


def logged_values(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss, its terms and similarities in one event: all numbers but those under the engine's own keys."""
    return {
        key: float(value)
        for key, value in event.items()
        if key not in EVENT_KEYS - {"loss"} and isinstance(value, (int, float))
    }
