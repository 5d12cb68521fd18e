"""`Workers`: how many processes work, on this machine or on a Ray cluster, and the pool that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from silotune.core.process_pool import worker_pool
from silotune.core.ray_pool import ray_pool
from silotune.errors import InputError


@dataclass(frozen=True)
class Workers:
    """Where work is done.

    Args:
        number: of processes; on a cluster 0 stands for as many as it has cores for.
        cluster: a Ray cluster's address (see `silotune.core.ray_pool`); None: processes of this machine.
    """

    number: int = 0
    cluster: str | None = None

    @classmethod
    def of(cls, workers: int | Workers) -> Workers:
        """Return workers, where a number stands for processes of this machine."""
        return workers if isinstance(workers, Workers) else cls(workers)

    def __post_init__(self) -> None:
        if self.number < (self.cluster is None):
            raise InputError(f"workers: must be at least 1 (got {self.number}); 0 is for a cluster alone")

    @property
    def here(self) -> bool:
        """Whether this process does the work."""
        return self.cluster is None and self.number == 1

    @contextmanager
    def pool(
        self,
        imports: Sequence[str] = (),
        prepare: Callable[[Any], None] | None = None,
        given: Any = None,
        threads: int | None = None,
        copies: bool = False,
    ) -> Iterator[tuple[Executor, int]]:
        """Start the workers, which live as long as the context, and give the pool and their number.

        Args:
            imports: modules that processes of this machine share.
            prepare: called in each of these when it starts.
            given: its argument.
            threads: PyTorch's threads in each worker of a cluster; None: as in this process.
            copies: whether idle workers of a cluster copy the work of slow ones; only for work without other effects.

        Raises:
            SilotuneError: a worker was lost.
        """
        if self.cluster is not None:
            with ray_pool(self.number, self.cluster, threads, copies) as on_cluster:
                yield on_cluster, on_cluster.workers
        else:
            with worker_pool(self.number, imports, prepare, given) as here:
                yield here, self.number
