"""Decides which silos take part in a run, by their handshake, and waits for them before the first round."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from silotune.config.coordinator import FederationConfig
from silotune.core.clock import log_line
from silotune.core.records import Records
from silotune.distributed.coordinator.dispatcher import SiloDispatcher
from silotune.distributed.coordinator.run_registry import RunRegistry
from silotune.distributed.protocol.frames import Frame
from silotune.distributed.protocol.handshake import WAITS_FOR_APPROVAL, Hello, Identity, check_identity
from silotune.errors import SilotuneError
from silotune.runs.engines.base import Progress
from silotune.runs.storage.run_folder import RunFolder

Shapes = Callable[[str], Mapping[str, tuple[int, ...]]]
"""Silo → the shapes of the tensors in its broadcasts, by name."""


class AdmissionPolicy:
    """Admits a silo whose identity equals the coordinator's and whose task is unchanged in this run."""

    def __init__(self, identity: Identity, registry: RunRegistry, record: Records) -> None:
        self.identity = identity
        self.registry = registry
        self._record = record
        self._identities: dict[str, Identity] = {}
        self._shapes: Shapes | None = None

    def __call__(self, frame: Frame) -> None:
        """Check a silo's hello and register the silo.

        Raises:
            HandshakeRefused: its identity differs from the coordinator's.
        """
        hello = Hello.read(frame)
        check_identity(hello.silo, self.identity_for(hello.silo), hello.identity)
        self.registry = self.registry.with_silo(hello)
        self._identities[hello.silo] = hello.identity
        self._record.append({"kind": "joined", "run": self.registry.run, "silo": hello.silo})

    def expect(self, shapes: Shapes) -> None:
        """Compare the shapes of shared parts, too: of admitted silos now, of others at their hello."""
        self._shapes = shapes
        for name, identity in sorted(self._identities.items()):
            check_identity(name, self.identity_for(name), identity)

    def identity_for(self, silo: str) -> Identity:
        """Return the coordinator's identity, with the shapes of a silo's parts once these are known."""
        return self.identity if self._shapes is None else replace(self.identity, shapes=self._shapes(silo))


@dataclass
class FailureLog:
    """Prints silos' failures. Before there is a run folder it keeps the last of each silo, later it writes events."""

    progress: Progress
    folder: RunFolder | None = None
    refusals: dict[str, str] = field(default_factory=dict)

    def __call__(self, sender: str, event: str) -> None:
        """Log one failure of a silo or node."""
        sender, event = sender[:100], event[:500]  # both may quote a silo
        log_line(f"silotune coordinator: {sender}: {event}", sys.stdout)
        waits = event.startswith(WAITS_FOR_APPROVAL)
        if self.folder is not None:
            self.folder.event("silo-waiting" if waits else "silo-failed", silo=sender, reason=event)
        else:
            self.refusals[sender] = event
            self.progress(1, event, 0, 1)


def wait_for_silos(
    dispatcher: SiloDispatcher, admission: AdmissionPolicy, failures: FailureLog, options: FederationConfig
) -> None:
    """Wait until all silos are admitted; for silos of an earlier start of the run, only `federation.away` seconds.

    Args:
        dispatcher: greets the silos' nodes.
        admission: knows the silos of an earlier start.
        failures: gets the silos of an earlier start that are missing.
        options: the section `federation`.

    Raises:
        SilotuneError: silos that never took part did not join in time.
    """
    known = admission.registry.silos
    absent = dispatcher.wait_for_all(options.join, known, options.away)
    missing = [name for name in absent if name not in known]
    if missing:
        reasons = "".join(f"; {sender}: {event}" for sender, event in sorted(failures.refusals.items()))
        late = f"silos that did not join within federation.join={options.join:g} s: {', '.join(missing)}"
        raise SilotuneError(f"{late}; nothing began{reasons}")
    for name in absent:
        failures(name, f"did not join again within federation.away={options.away:g} s; the run goes on")
