"""Local training: each silo tunes its own model and sends nothing."""

from __future__ import annotations

from silotune.methods import PRIVATE, Part, Scope, Supervised


class Local(Supervised):
    """No federation: adapters and head stay in the silo."""

    name = "local"
    paper = "baseline without communication"
    scope = Scope.PRIVATE
    stem = PRIVATE

    def head(self) -> Part:
        """The head is private, whatever the setting says: nothing is sent."""
        return Part(self.setting.head, Scope.PRIVATE)
