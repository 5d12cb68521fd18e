"""`RequestLimits`: requests, numbers, choices of rows and how often each is used; `WorkGuard`: time and memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from silotune.communication.privacy.budget import BudgetSpent
from silotune.config import Config
from silotune.distributed.silo.exposure import RowUse
from silotune.distributed.silo.policy import Policy, PolicyRefused
from silotune.distributed.silo.policy_config import most
from silotune.distributed.silo.request_ledger import RequestLedger, RequestRecord


class UpdateWithheld(PolicyRefused):
    """Too few rows are behind a silo's update for it to leave."""


FEWEST_STEPS = 2
"""Steps of `policy.batch_size` rows, counted by how far they move the model, that must be behind an update."""

SPARE_SCORES = 10
"""Score requests of a run beyond two for each of its rounds, more than an honest coordinator needs."""


@dataclass
class RequestLimits:
    """Counts one silo's requests against the operator's limits.

    Args:
        policy: the operator's limits.
        ledger: what was worked on so far.
    """

    policy: Policy
    ledger: RequestLedger

    def admit(self, record: RequestRecord, config: Config, backbone_parameters: int) -> None:
        """Record a request that the limits allow, before it is worked on.

        Args:
            record: the request.
            config: the run's.
            backbone_parameters: how many parameters the backbone has.

        Raises:
            PolicyRefused: naming the limit.
        """
        limits, refused = self.policy.limits, self.policy.refused
        first = 0 if record.kind == "score" else 1  # the start can be scored
        if not first <= record.round <= config.rounds:
            raise refused(f"round {str(record.round)[:20]}", f"the run has {config.rounds}")
        tally = self.ledger.tally(record)
        if tally.known:
            return
        if record.kind == "score":
            needed = 2 * config.rounds + SPARE_SCORES
            in_run = None if limits.scores is None else min(limits.scores, needed)
            counted = [("score requests in this run", tally.scores, in_run, "scores")]
            counted += [("score requests in all runs", tally.scores_in_all, limits.scores_in_all, "scores_in_all")]
        else:
            again = tally.requests_for_round
            counted = [("local rounds in all runs", tally.rounds_in_all, limits.rounds_in_all, "rounds_in_all")]
            counted += [(f"requests for round {record.round}", again, limits.requests_per_round, "requests_per_round")]
        for what, before, limit, key in counted:
            if limit is not None and before >= limit:
                raise refused(f"more {what}", f"at most {limit:,} (policy.{key})")
        numbers = most(limits.numbers_in_all, backbone_parameters)
        if numbers is not None and tally.numbers_in_all + record.numbers > numbers:
            allowed = f"at most {numbers:,} ({limits.numbers_in_all}; policy.numbers_in_all)"
            raise refused(
                f"{record.numbers:,} more numbers over {tally.numbers_in_all:,} that left in all runs", allowed
            )
        self.ledger.record(record)

    def check_withheld(self, record: RequestRecord) -> None:
        """Refuse a request like one whose update was withheld, and any of a run that had too many without an answer.

        Whether an update is withheld, or a loss is finite, tells something of the rows, a bit a request; so few may be.

        Raises:
            UpdateWithheld: the update that is asked for was withheld.
            PolicyRefused: too many were; in words that are the same for all rows.
        """
        limits = self.policy.limits
        withheld = self.ledger.withheld()
        if not limits.effective_rows:  # lifted since
            withheld = {request: why for request, why in withheld.items() if why == "failed"}
        if record.kind != "score" and withheld.get((record.run, record.request)) == "few rows":
            raise self._withheld()
        of_run = sum(run == record.run for run, _ in withheld)
        for count, limit, key in ((of_run, limits.withheld, "withheld"),
                                  (len(withheld), limits.withheld_in_all, "withheld_in_all")):  # fmt: skip
            if limit is not None and count > 0 and count >= limit:
                why = f"too few rows were behind updates, or requests failed (policy.{key})"
                raise self.policy.refused("more requests", why)

    @contextmanager
    def failures_counted(self, record: RequestRecord) -> Iterator[None]:
        """Count work that ends in an error, which a broadcast can be made for: some rows alone may cause it.

        What the disk or the privacy budget refuses is no such error.

        Args:
            record: the request that is worked on.
        """
        try:
            yield
        except (OSError, BudgetSpent):
            raise
        except Exception:
            self.ledger.record_withheld(record, "failed")
            raise

    def withhold(self, record: RequestRecord, effective_rows: float | None, rows_of_steps: float | None = None) -> None:
        """Withhold an update that too few rows are behind, or hardly more than one of the smallest steps; record it.

        Args:
            record: the request.
            effective_rows: see `RowInfluence`.
            rows_of_steps: see `RowInfluence`.

        Raises:
            UpdateWithheld: it is withheld.
        """
        limits = self.policy.limits
        few = effective_rows is not None and effective_rows < limits.effective_rows
        if few or (rows_of_steps is not None and rows_of_steps < FEWEST_STEPS * limits.batch_size):
            self.ledger.record_withheld(record, "few rows")
            raise self._withheld()

    def _withheld(self) -> UpdateWithheld:
        refusal = self.policy.refused("this update", "too few rows are behind it (policy.effective_rows)")
        return UpdateWithheld(str(refusal))

    def check_use(self, use: RowUse) -> None:
        """Judge what a run does with the rows against what earlier runs did.

        Raises:
            PolicyRefused: naming the limit.
        """
        self._is_new_choice(use)
        self._is_new_exposure(use)

    def record_use(self, use: RowUse) -> None:
        """Record what a run is about to do with the rows; raises as `check_use`."""
        choice, exposure = self._is_new_choice(use), self._is_new_exposure(use)
        if choice:
            self.ledger.record_rows(use.splits)
        if exposure:
            self.ledger.record_exposure(use.exposure)

    def _is_new_choice(self, use: RowUse) -> bool:
        """Judge a choice of rows: two that differ by a few rows would tell these by the difference of two answers.

        Returns:
            Whether it is to be recorded: it was not used before, and something limits it.

        Raises:
            PolicyRefused: naming the limit.
        """
        limits, refused = self.policy.limits, self.policy.refused
        if limits.row_sets is None and not limits.row_difference:
            return False
        used = self.ledger.row_sets()
        if use.splits in used:
            return False
        if limits.row_sets is not None and len(used) >= limits.row_sets:
            raise refused("another choice of rows", f"at most {limits.row_sets} (policy.row_sets)")
        for earlier in used:
            for split, rows in use.splits.items():
                if rows != earlier[split] and len(rows ^ earlier[split]) < limits.row_difference:
                    raise refused(
                        f"a {split} split that differs by a few rows from one of an earlier run",
                        f"at least {limits.row_difference} rows (policy.row_difference)",
                    )
        return True

    def _is_new_exposure(self, use: RowUse) -> bool:
        """Judge how often rows are used: the difference of two answers must not be that of a few rows, either.

        Returns, Raises:
            As `_is_new_choice`.
        """
        limits, refused = self.policy.limits, self.policy.refused
        if not limits.row_steps:
            return False
        used, own = self.ledger.exposures(), use.exposure
        if own in used:
            return False
        for earlier in used:
            if earlier.rows != own.rows:
                continue
            difference = own.difference(earlier, use.rows)
            if difference is not None and difference < limits.row_steps:
                raise refused(
                    "an update that may differ from one of an earlier run by so few rows × steps",
                    f"the same steps or epochs, batches, schedule and clip_norm, or a difference of at least "
                    f"{limits.row_steps} "
                    "(policy.row_steps)",
                )
            if 0 < use.cut_otherwise(earlier.max_length) < limits.row_difference:
                raise refused(
                    f"train.max_length={own.max_length}, which cuts a few rows otherwise than an earlier run did",
                    f"the same, or at least {limits.row_difference} such rows (policy.row_difference)",
                )
        return True


@dataclass
class WorkGuard:
    """Ends a request that takes too long or too much memory; called before every forward of the backbone.

    Args:
        policy: the operator's limits.
    """

    policy: Policy
    _until: float = float("inf")

    def begin(self) -> None:
        """Start the clock of a request."""
        seconds = self.policy.limits.seconds
        self._until = float("inf") if seconds is None else time.monotonic() + seconds

    def __call__(self) -> None:
        """Check clock and memory.

        Raises:
            PolicyRefused: naming the limit.
        """
        limits, refused = self.policy.limits, self.policy.refused
        if time.monotonic() > self._until:
            raise refused("a request of so many seconds", f"at most {limits.seconds:g} (policy.seconds)")
        if limits.memory_mib is not None and memory_mib() > limits.memory_mib:
            raise refused("a request of so much memory", f"at most {limits.memory_mib:,} MiB (policy.memory_mib)")


def memory_mib() -> float:
    """Return the memory that this process has in use (resident set), in MiB."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, ValueError, IndexError):  # no Linux: the peak stands for it
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
