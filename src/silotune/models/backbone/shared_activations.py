"""`SharedActivations`: outputs below the first adapted module, kept from one forward for others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from silotune.models.backbone.architectures import Architecture


@dataclass
class SharedActivations:
    """Outputs of modules below the first changed one, shared by several forwards over the same rows.

    The first forward records them and the later ones read them. They are constants: no part acts on them.

    Args:
        modules: modules whose outputs may be shared. A module inside another is only asked for if the outer one's
            output is not shared.
        changed_inputs: modules whose input some plan changes.
        changed_outputs: modules whose output some plan changes; their own output, before any change, is still shared.
        activations: module → its output: a tensor of shape (rows, tokens, hidden), or a tuple that begins with one.
        recording: whether the running forward records outputs; it stops at the first change.
        complete: whether a forward has ended: later ones read `activations`.
        prefix_only: whether nothing but the shared activations is wanted: the forward stops at the first change.
    """

    modules: frozenset[str]
    changed_inputs: frozenset[str]
    changed_outputs: frozenset[str]
    activations: dict[str, Any] = field(default_factory=dict)
    recording: bool = True
    complete: bool = False
    prefix_only: bool = False

    @classmethod
    def below_first_change(
        cls, base: Any, architecture: Architecture | None, inputs: frozenset[str], outputs: frozenset[str]
    ) -> SharedActivations:
        """Return an empty record for forwards over the same rows, the first of which fills it.

        It holds the outputs of the embeddings, of the blocks below the first with a change, and of that block's modules
        before the change. Nothing is shared in families without an entry and in encoder–decoders, whose embeddings run
        twice.

        Args:
            base: the base transformer.
            architecture: the family's entry, if it has one.
            inputs: modules whose input some forward changes.
            outputs: modules whose output some forward changes.
        """
        if architecture is None or base.config.is_encoder_decoder:
            return cls(frozenset(), inputs, outputs)
        names = [architecture.embeddings]
        for block in range(len(base.get_submodule(architecture.blocks))):
            name = f"{architecture.blocks}.{block}"
            names.append(name)
            if any(changed.startswith(f"{name}.") for changed in inputs | outputs):
                names += [f"{name}.{inner}" for inner, _ in base.get_submodule(name).named_modules() if inner]
                break
        return cls(frozenset(names), inputs, outputs)

    def stop_recording(self) -> None:
        """Note that the running forward has reached a change: outputs of later modules are not shared.

        Raises:
            StopForward: if only the shared activations are wanted.
        """
        self.recording = False
        if self.prefix_only:
            raise StopForward

    @property
    def outermost(self) -> list[str]:
        """The recorded modules that lie inside no other recorded module, in the order in which they ended."""
        recorded = self.activations
        return [name for name in recorded if not any(name.startswith(f"{other}.") for other in recorded)]


class StopForward(Exception):
    """Ends a forward at the first change."""
