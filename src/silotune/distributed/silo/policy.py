"""Compares a coordinator's requests with the caps of the operator's policy."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from silotune.communication.privacy.accountant import largest_delta
from silotune.distributed.protocol.frames import HandshakeRefused
from silotune.distributed.silo.silo_config import PolicyConfig
from silotune.methods.parts import Scope
from silotune.models.backbone.backbone import Backbone
from silotune.training.federation import Federation
from silotune.training.row_privacy import units_of

POLICY_REFUSES = "its policy refuses"
"""Words in every refusal by a cap."""

MIB = 2**20


class PolicyRefused(HandshakeRefused):
    """A cap of the operator's policy excludes a run or a request."""


class WorkRefused(PolicyRefused):
    """A cap on time, memory or disk that work reached; where rows have noise, only the silo's log says so."""


@dataclass(frozen=True)
class Request:
    """A request of a coordinator; equal requests count once.

    Args:
        kind: `round`, `final`, `score` or `survey`.
        digest: sha256 of everything that its answer depends on.
        numbers: how many numbers leave for it.
    """

    run: str
    kind: str
    round: int
    digest: str
    numbers: int = 0


@dataclass(frozen=True)
class Policy:
    """Compares runs and requests with the operator's caps."""

    silo: str
    limits: PolicyConfig

    def check_run(self, federation: Federation, parameters: int) -> None:
        """Refuse a run that has too many rounds, or that sends too many numbers in each."""
        self._at_most("rounds", federation.config.rounds, self.limits.rounds, "rounds")
        for number in federation.method.kinds_of_rounds(federation.config.rounds):
            self.check_numbers(federation.sent_numbers(number).total(), parameters)

    def check_delta(self, delta: float, units: int, whose: str) -> None:
        """Refuse, under `private`, a δ that is too large for so many units."""
        most = largest_delta(units)
        if self.limits.preset == "private" and delta > most:
            raise PolicyRefused(
                f"silo {self.silo!r}: δ = {delta:g} ({whose}) protects no {units:,} units; allowed: at most {most!r} "
                "(0.1 / units)"
            )

    def check_work(self, federation: Federation, delta: float | None = None) -> None:
        """Refuse updates of too few rows or steps, and too large a δ; these refusals tell something of the silo's rows.

        `delta` is that of the operator's budget of noise on rows.
        """
        context, (silo,) = federation.context, federation.silos.values()
        rows = sum(map(len, silo.train.values())) if context.row_privacy is None else len(units_of(silo))
        if federation.privacy is not None and context.row_privacy is not None:
            self.check_delta(federation.privacy.account.delta, rows, "privacy.delta of the run")
            self.check_delta(0.0 if delta is None else delta, rows, "privacy.delta of its silo config")
        if rows < self.limits.train_rows:
            raise self.refused("a training split of so few rows", f"at least {self.limits.train_rows}", "train_rows")
        for phases in context.kinds_of_rounds():
            shared_phases = [p for p in phases if any(context.parts[name].scope is Scope.SHARED for name in p.changes)]
            steps = sum(context.batches(silo, phase) * phase.steps_per_batch for phase in shared_phases)
            if shared_phases and steps < self.limits.train_steps:
                raise self.refused("an update of so few steps", f"at least {self.limits.train_steps}", "train_steps")

    def check_numbers(self, count: int, parameters: int) -> None:
        """Refuse an update with too many numbers."""
        limit = _most(self.limits.numbers_per_round, parameters)
        self._at_most("numbers in an update", count, limit, "numbers_per_round")

    def check_request(self, request: Request, before: tuple[int, int, int], backbone: int, rounds: int) -> None:
        """Refuse a request for a round that the run does not have, and requests beyond the caps.

        `before` counts earlier requests, those for the same round, and the numbers that left.
        """
        limits, (requests, again, numbers) = self.limits, before
        trains = request.kind not in ("score", "survey")
        if not int(trains) <= request.round <= rounds:
            number = str(request.round)[:20]
            raise PolicyRefused(f"silo {self.silo!r}: {POLICY_REFUSES} round {number}; the run has {rounds}")
        self.check_total(requests + 1, numbers + request.numbers, backbone)
        if trains:
            what, most = f"requests for round {request.round}", limits.requests_per_round
            self._at_most(what, again + 1, most, "requests_per_round")

    def check_total(self, requests: int, numbers: int, backbone: int) -> None:
        """Refuse more requests, or more numbers in all updates, than all runs together may have."""
        self._at_most("requests in all", requests, self.limits.requests_in_all, "requests_in_all")
        in_all = _most(self.limits.numbers_in_all, backbone)
        self._at_most("numbers in all updates", numbers, in_all, "numbers_in_all")

    def check_disk(self, used: int, more: int) -> None:
        """Refuse to write more bytes than `policy.disk_mib` leaves."""
        limit = self.limits.disk_mib
        if limit is not None and used + more > limit * MIB:
            more_files, allowed = "more files of runs", f"at most {limit:,} MiB; remove finished runs' folders"
            raise self.refused(more_files, allowed, "disk_mib", WorkRefused)

    def _at_most(self, what: str, value: float, limit: float | None, key: str) -> None:
        if limit is not None and value > limit:
            raise self.refused(f"{value:,} {what}", f"at most {limit:,}", key)

    def refused(self, what: str, allowed: str, key: str, kind: type[PolicyRefused] = PolicyRefused) -> PolicyRefused:
        """Return a refusal that names the request, the allowed value and the key of the cap."""
        return kind(f"silo {self.silo!r}: {POLICY_REFUSES} {what}; {allowed} (policy.{key})")


@dataclass
class WorkGuard:
    """Ends a request that takes too long or too much memory; called before every forward of the backbone."""

    policy: Policy
    _until: float = float("inf")

    def begin(self) -> None:
        """Start the clock of a request."""
        seconds = self.policy.limits.seconds
        self._until = float("inf") if seconds is None else time.monotonic() + seconds

    def __call__(self) -> None:
        """Check clock and memory."""
        limits, refused = self.policy.limits, self.policy.refused
        if time.monotonic() > self._until:
            raise refused("a request of so many seconds", f"at most {limits.seconds:g}", "seconds", WorkRefused)
        if limits.memory_mib is not None and memory_mib() > limits.memory_mib:
            allowed = f"at most {limits.memory_mib:,} MiB"
            raise refused("a request of so much memory", allowed, "memory_mib", WorkRefused)


def memory_mib() -> float:
    """Return the memory that this process has in use (resident set), in MiB."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, ValueError, IndexError):  # no Linux: the peak stands for it
        import resource  # Windows has none

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**20 if sys.platform == "darwin" else peak / 1024


def backbone_parameters(backbone: Backbone) -> int:
    """Return how many parameters a backbone has."""
    return sum(int(parameter.numel()) for parameter in backbone.base.parameters())


def _most(amount: int | str | None, backbone: int) -> int | None:
    """Return a limit as a count of numbers; it may be given as a share of the backbone's parameters."""
    return int(float(amount.rstrip("%")) / 100 * backbone) if isinstance(amount, str) else amount
