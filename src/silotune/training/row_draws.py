"""`RowDraws`: where a silo's draws about its rows come from, the order of rows and the dropout of its local steps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from silotune.core.randomness import derive


@dataclass(frozen=True)
class RowDraws:
    """The seed of a silo's draws about its own rows, and in what they differ.

    Who knows the order of rows can solve many updates for single rows' gradients. Who does not know it, but gets
    updates of many different orders from one broadcast, can do so as well, by independent component analysis, wherever
    rows weigh unequally. So a silo that keeps its order secret has one order for all rounds and runs: the same
    broadcast then gives the same update. Shuffling once converges as fast as shuffling in every pass (Mishchenko,
    Khaled and Richtárik 2020, arXiv:2006.05988).

    Args:
        seed: of all draws.
        same_order: whether the passes of every phase, round and run go over the rows in the same orders: the first pass
            in one, the second in another.
        recipe: what dropout masks depend on, beside seed and step.
    """

    seed: int
    same_order: bool = False
    recipe: str = ""

    @classmethod
    def secret(cls, key: bytes, recipe: str) -> RowDraws:
        """Return the draws of a silo that keeps its order secret.

        Args:
            key: known to the silo alone.
            recipe: text of the run's settings. Runs whose dropout rates differ by little would otherwise differ by one
                element of one row.
        """
        return cls(int.from_bytes(key, "big"), same_order=True, recipe=recipe)

    @property
    def masks(self) -> int:
        """The seed of dropout masks."""
        if not self.recipe:
            return self.seed
        return int.from_bytes(hashlib.sha256(f"{self.seed:x} {self.recipe}".encode()).digest(), "big")

    def split_seed(self, seed: int) -> int:
        """Return the seed by which rows are split, for the one of a run's configuration.

        Who knows the splits of many seeds can search for seeds whose updates, added and subtracted, leave few rows.
        """
        return derive(self.seed, "split", seed) if self.same_order else seed

    def order(self, silo: str, number: int, phase: str, count: int, whole: bool) -> tuple[str | int, ...]:
        """Return the purpose for which a pass's order is drawn; see `core.randomness`.

        Args:
            silo: the silo's name.
            number: the round's number.
            phase: the phase's name.
            count: earlier passes in the phase.
            whole: whether the phase has whole passes alone. Where `train.steps` ends it earlier, one order would leave
                out the same rows in all rounds.
        """
        return (silo, "every round", count) if self.same_order and whole else (silo, number, phase, count)
