"""`ray_pool`: workers on a Ray cluster (`--engine ray`), as a pool to which work is submitted; extra `ray`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

import torch

from silotune.errors import InputError, SilotuneError

LOCAL = "local"
"""The address at which there is no cluster: one is started on this machine, and ends with the run."""

_TRIES = 4
"""How many workers a piece of work may be given; one that needs too much memory must not end them all."""


@contextmanager
def ray_pool(workers: int, address: str, threads: int | None = None) -> Iterator[RayPool]:
    """Start workers on a cluster, each an actor with cores (and a share of the GPUs) of its own.

    Work that is lost with a machine is done again on the others. The workers need silotune, the backbone and the rows
    under the same paths.

    Args:
        workers: number of workers; 0: as many as the cluster has cores for.
        address: the cluster's, as `ray.init` takes it (`auto`, `host:port`, `ray://host:port`); or `LOCAL`.
        threads: PyTorch's threads in a worker, and its cores; None: as many as this process has. Bits depend on it.

    Raises:
        InputError: Ray is not installed, there is no cluster, or it has too few cores.
        SilotuneError: all workers were lost, or several with the same piece of work.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError("--engine ray: needs Ray; pip install 'silotune[ray]'") from error
    cores = threads or torch.get_num_threads()
    begun = not ray.is_initialized()
    if begun:
        _connect(ray, address)
    pool = None
    try:
        pool = RayPool(ray, _number(ray, workers, cores), cores)
        yield pool
    finally:
        if pool is not None:
            pool.shutdown()
        if begun:
            ray.shutdown()


class RayPool(Executor):
    """Actors that take work in turn: the one with the least work is given the next.

    Args:
        ray: the module.
        workers: number of actors.
        cores: of each.
    """

    def __init__(self, ray: Any, workers: int, cores: int) -> None:
        self.workers = workers
        self._ray = ray
        gpus = ray.cluster_resources().get("GPU", 0)
        share = 0 if not gpus else gpus // workers or gpus / workers
        actor = ray.remote(_Worker).options(
            num_cpus=cores,
            num_gpus=share,
            scheduling_strategy="SPREAD",
        )
        self._actors = [actor.remote(cores) for _ in range(workers)]
        self._work = dict.fromkeys(range(workers), 0)
        """Worker that is not lost → pieces of work that it has."""
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a worker call a function of an installed module; its errors are those of the function."""
        result: Future[Any] = Future()
        self._give((function, args, kwargs), result, _TRIES)
        return result

    def _give(self, work: tuple[Any, ...], result: Future[Any], tries: int) -> None:
        """Give work to the worker that has the least."""
        with self._lock:
            chosen = min(self._work, key=self._work.__getitem__, default=None)
            if chosen is not None and tries:
                self._work[chosen] += 1
        if chosen is None or not tries:  # outside the lock: whoever waits for the result may give more work
            lost = "all workers of the cluster are" if chosen is None else f"{_TRIES} workers with the same work were"
            result.set_exception(SilotuneError(f"{lost} lost (out of memory?); run again with --resume"))
            return

        def finish(done: Future[Any]) -> None:
            error = done.exception()
            with self._lock:
                if isinstance(error, self._ray.exceptions.RayActorError):
                    self._work.pop(chosen, None)
                elif chosen in self._work:
                    self._work[chosen] -= 1
            if error is None:
                result.set_result(done.result())
            elif isinstance(error, self._ray.exceptions.RayActorError):
                self._give(work, result, tries - 1)
            else:  # Ray's error has the worker's traceback as its text, the cause is what was raised
                result.set_exception(getattr(error, "cause", None) or error)

        self._actors[chosen].call.remote(*work).future().add_done_callback(finish)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers at once, with what they do."""
        for actor in self._actors:
            self._ray.kill(actor)


class _Worker:
    """An actor: a process on a machine of the cluster."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function."""
        return function(*args, **kwargs)


def _connect(ray: Any, address: str) -> None:
    """Join a cluster, or start one of this machine's cores.

    Raises:
        InputError: there is no cluster.
    """
    # Modules that this process can import, for workers on the same file system.
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        ray.init(
            address=address,
            include_dashboard=False if address == LOCAL else None,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise InputError(
            f"--address {address}: no cluster there ({reason}); allowed: auto, HOST:PORT, ray://HOST:PORT, {LOCAL}"
        ) from error


def _number(ray: Any, workers: int, cores: int) -> int:
    """Return the number of workers.

    Raises:
        InputError: the cluster has too few cores.
    """
    # A worker's cores are those of one machine.
    most = sum(int(node["Resources"].get("CPU", 0)) // cores for node in ray.nodes() if node["Alive"])
    if workers > most or not most:
        raise InputError(
            f"--workers {max(workers, 1)}: the cluster has cores for {most} of threads={cores}; allowed: "
            + (f"1 to {most}, or fewer threads" if most else "fewer threads")
        )
    return workers or most
