"""Sample the silos of a round, from all silos or from each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from silotune.core.numeric import ceil_fraction
from silotune.core.randomness import sampler


def silos_a_round(silos: int, fraction: float | None, count: int | None) -> int:
    """Return how many silos take part in a round: a fraction, rounded up, or a count; all of them without either."""
    if count is None:
        count = silos if fraction is None else max(1, ceil_fraction(fraction, silos))
    return min(count, silos)


@dataclass(frozen=True)
class SiloSampling:
    """How silos are sampled; the draws follow from seed and round.

    Args:
        seed: the run's.
        fraction: the share of the silos that a round samples; None if `count` is given, or if all take part.
        count: the number of silos that a round samples; None if `fraction` is given, or if all take part.
        groups: silo → its group. Fraction and count then apply to every group; if None, to all silos together.
    """

    seed: int
    fraction: float | None = None
    count: int | None = None
    groups: Mapping[str, str] | None = None

    def choose(self, number: int, silos: Sequence[str]) -> list[str]:
        """Sample the silos of a round, in name order: at least one, and at least one of each group."""
        if self.groups is None:
            return self._sample(sorted(silos), number)
        members: dict[str, list[str]] = {}
        for name in sorted(silos):
            members.setdefault(self.groups[name], []).append(name)
        return sorted(name for group, names in members.items() for name in self._sample(names, number, group))

    def _sample(self, names: list[str], *purpose: str | int) -> list[str]:
        count = silos_a_round(len(names), self.fraction, self.count)
        if count >= len(names):
            return names
        return sorted(sampler(self.seed, "choose", *purpose).sample(names, count))
