"""Local training: each silo tunes its own model and sends nothing."""

from __future__ import annotations

from silotune.methods import PRIVATE, Part, Scope, Supervised


class Local(Supervised):
    """No federation: adapters and head stay in the silo."""

    name = "local"
    paper = "baseline without communication"
    scope = Scope.PRIVATE
    adapter_name = PRIVATE

    def head(self) -> Part:
        """Return a private head, whatever `head.scope` says, because nothing is sent."""
        return Part(self.setting.head, Scope.PRIVATE)
