"""`require_approval`: a run that the silo's operator has not approved is noted and waits; `still_approved`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from silotune.config import Config
from silotune.distributed.protocol.handshake import WAITS_FOR_APPROVAL, HandshakeRefused
from silotune.distributed.silo.approvals import Approvals, configuration_digest, configuration_of
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.state_store import check_run_id
from silotune.errors import SilotuneError

MOST_WAITING = 10
"""Runs that may wait for approval at once: each is kept on disk, and a person reads them."""


class WaitsForApproval(SilotuneError):
    """A run that the silo's operator has not decided about yet."""


def require_approval(settings: SiloSettings, run: str, config: Config, describe: Callable[[], list[str]]) -> None:
    """Require that the operator approved a run; record one that was not seen before.

    Args:
        settings: the operator's.
        run: the run's id.
        config: the run's, as it was sent.
        describe: returns lines about the run for the operator.

    Raises:
        WaitsForApproval: the operator has not decided.
        HandshakeRefused: the operator rejected the run, or too many runs wait.
    """
    check_run_id(run)
    if _needs_no_approval(settings):
        return
    approvals, configuration = Approvals(Path(settings.folder)), configuration_of(config)
    digest = configuration_digest(configuration)
    request = approvals.find(run, digest)
    if request is None:
        waiting = sum(each.state == "pending" for each in approvals.all())
        if waiting >= MOST_WAITING:
            raise HandshakeRefused(f"silo {settings.name!r}: {waiting} other runs wait for approval; no more may")
        request = approvals.ask(run, digest, configuration, describe)
    elif request.state == "pending":  # the rows or the operator's settings may be others than when it first asked
        request = approvals.described_anew(request, describe())
    if request.state == "rejected":
        raise HandshakeRefused(f"silo {settings.name!r}: its operator rejected the run {request.name}")
    if request.state == "pending":
        raise WaitsForApproval(f"{WAITS_FOR_APPROVAL} at {settings.name} (silotune silo show {request.name})")


def still_approved(settings: SiloSettings, run: str, config: Config) -> bool:
    """Return whether a run that was let in still is: its operator may have rejected it since.

    Args:
        settings: the operator's.
        run: the run's id.
        config: the run's, as it was sent.
    """
    if _needs_no_approval(settings):
        return True
    request = Approvals(Path(settings.folder)).find(run, configuration_digest(configuration_of(config)))
    return request is not None and request.state == "approved"


def _needs_no_approval(settings: SiloSettings) -> bool:
    """Return whether the policy decides alone, or the parties agreed on a configuration, which is checked elsewhere."""
    return settings.approval == "policy" or settings.config is not None
