"""What lies below the first part: computed once for all forwards over the same rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SharedActivations:
    """What several forwards over the same rows have in common: the outputs of modules below the first changed one.

    The first forward fills it, the others take from it. Everything in it is constant: no part acts there.

    Args:
        modules: those whose outputs may be kept; a module inside another is asked for only where the other is not
            kept.
        inputs: modules whose input some plan changes.
        outputs: modules whose output some plan changes; their own, before any change, is still common.
    """

    modules: frozenset[str]
    inputs: frozenset[str]
    outputs: frozenset[str]
    found: dict[str, Any] = field(default_factory=dict)
    open: bool = True
    """Whether the running forward fills it and has not met a change yet."""
    filled: bool = False
    """Whether a forward has gone through: the next ones take."""
    alone: bool = False
    """Whether only this is wanted: the forward ends where it meets a change."""

    def changed(self) -> None:
        """A change is met: nothing behind it is common.

        Raises:
            Reached: where only what is below was wanted.
        """
        self.open = False
        if self.alone:
            raise StopForward

    @property
    def outermost(self) -> list[str]:
        """The modules found that are not inside another one found, in the order in which they ended."""
        return [name for name in self.found if not any(name.startswith(f"{other}.") for other in self.found)]


class StopForward(Exception):
    """A forward has come to the first change."""
