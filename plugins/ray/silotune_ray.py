"""The engine `ray` of silotune: a pool of workers on a Ray cluster, where each piece of work is a task of Ray's."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, cast

import ray
import torch
from typing_extensions import override

from silotune.errors import InputError, SilotuneError
from silotune.runs.engines.multi_process import MultiProcessEngine

LOCAL = "local"
"""The address at which there is no cluster: one is started on this machine, and ends with the run."""

_RETRIES = 3
"""How often Ray does work again whose machine or process was lost."""


@contextmanager
def ray_pool(workers: int, address: str, threads: int | None = None) -> Iterator[RayPool]:
    """Join a cluster, or start one on this machine, and give a pool of its workers.

    The workers need silotune, the backbone and the rows under the same paths.

    Args:
        workers: number of workers; 0: as many as the cluster has cores for.
        address: the cluster's, as `ray.init` takes it (`auto`, `host:port`, `ray://host:port`); or `LOCAL`.
        threads: PyTorch's threads in a worker, and its cores; None: as many as this process has. Bits depend on it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cores = threads or torch.get_num_threads()
    begun = not ray.is_initialized()
    if begun:
        _connect(address)
    try:
        with RayPool(ray, _number(workers, cores), cores) as pool:
            yield pool
    finally:
        if begun:
            ray.shutdown()


class RayEngine(MultiProcessEngine):
    """Trains silos in the workers of a cluster, to the bits of one process."""

    name = "ray"
    pool = staticmethod(ray_pool)


class RayPool(ThreadPoolExecutor):
    """Calls functions of installed modules on a cluster, each in a task with cores and a share of the GPUs of its own.

    A thread waits for each task, so that no more tasks run at a time than there are workers.
    """

    def __init__(self, cluster: Any, workers: int, cores: int) -> None:
        super().__init__(workers)
        self.workers = workers
        self._ray = cluster
        self._cores = cores
        gpus = cluster.cluster_resources().get("GPU", 0)
        share = gpus // workers or 1 / math.ceil(workers / gpus) if gpus else 0  # one lies on one GPU
        options = {"num_cpus": cores, "num_gpus": share, "max_retries": _RETRIES, "scheduling_strategy": "SPREAD"}
        self._task = cluster.remote(max_calls=0, **options)(_call)  # 0: processes live on and keep the backbone
        self._running: set[Any] = set()
        self._ended = False
        self._starting = threading.Lock()

    @override
    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._wait, function, args, kwargs)

    def _wait(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait for a function on the cluster, and return its value or raise its error."""
        with self._starting:
            if self._ended:
                raise CancelledError
            task = self._task.remote(self._cores, function, args, kwargs)
            self._running.add(task)
        try:
            return self._ray.get(task)
        except self._ray.exceptions.RayTaskError as error:  # its text is the worker's traceback
            raise getattr(error, "cause", None) or error from None
        except self._ray.exceptions.RayError as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            raise SilotuneError(f"work was lost on the cluster ({reason}); run again with --resume") from error
        finally:
            self._running.discard(task)

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel all work that is not finished."""
        super().shutdown(wait=False, cancel_futures=True)
        with self._starting:
            self._ended = True
        for task in [*self._running]:
            with suppress(Exception):  # it may have ended by now
                self._ray.cancel(task, force=True)
        super().shutdown(wait)


def _call(threads: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function in a process of the cluster."""
    torch.set_num_threads(threads)
    return function(*args, **kwargs)


def _connect(address: str) -> None:
    """Join a cluster, or start one of this machine's cores."""
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


def _number(workers: int, cores: int) -> int:
    """Return the number of workers."""
    # A worker's cores are those of one machine.
    nodes: list[dict[str, Any]] = cast(Any, ray).nodes()
    most = sum(int(node["Resources"].get("CPU", 0)) // cores for node in nodes if node["Alive"])
    if workers > most or not most:
        raise InputError(
            f"--workers {max(workers, 1)}: the cluster has cores for {most} of threads={cores}; allowed: "
            + (f"1 to {most}, or fewer threads" if most else "fewer threads")
        )
    return workers or most
