"""Describe where work runs (processes of this machine, or a cluster), and start the pool of workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing import forkserver, resource_tracker
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from silotune.core.surroundings import require_short_tmpdir
from silotune.errors import InputError, SilotuneError

_UNGUARDED = 77
"""Exit code of a worker that ran into the start of a run while it imported the main script."""

_FORKED = sys.platform == "linux"

_PATIENCE = 5
"""Seconds in which a process that has ended reports its exit code."""


@dataclass(frozen=True)
class Workers:
    """The place where work runs: processes of this machine or a cluster.

    Args:
        number: of processes; on a cluster 0 stands for as many as it has cores for.
        cluster: a cluster's address (of Ray: `auto`, `HOST:PORT`, `ray://HOST:PORT`, `local`); None: processes of this
            machine.
        engine: the name under which a package registers the cluster's engine (`registered_engine`).
    """

    number: int = 0
    cluster: str | None = None
    engine: str = "ray"

    @classmethod
    def of(cls, workers: int | Workers) -> Workers:
        """Return workers, where a number stands for processes of this machine."""
        return workers if isinstance(workers, Workers) else cls(workers)

    def __post_init__(self) -> None:
        if self.number < (self.cluster is None):
            raise InputError(f"workers: must be at least 1 (got {self.number}); 0 is for a cluster alone")
        if self.cluster is None and self.number > 1:
            _require_importable_script()
            if _FORKED:
                require_short_tmpdir()

    @property
    def here(self) -> bool:
        """Whether this process does the work."""
        return self.cluster is None and self.number == 1

    def begin(self, imports: Sequence[str]) -> None:
        """Let modules be imported for processes of this machine while this one does other work, before `pool`."""
        if self.cluster is None and self.number > 1 and _FORKED:
            _serve_forks(imports)

    @contextmanager
    def pool(self, imports: Sequence[str] = (), threads: int | None = None) -> Iterator[tuple[Executor, int]]:
        """Start the workers, which live as long as the context, and give the pool and their number.

        `imports` as of `worker_pool`; `threads` are those of a worker of a cluster, by default as many as here.

        Raises:
            SilotuneError: a worker was lost.
        """
        if self.cluster is not None:
            with registered_engine(self.engine).pool(self.number, self.cluster, threads) as on_cluster:
                yield on_cluster, on_cluster.workers
        else:
            with worker_pool(self.number, imports) as here:
                yield here, self.number


ENGINES = "silotune.engines"
"""The entry point group of engines from other packages."""


def registered_engine(name: str) -> Any:
    """Return the engine that a package registers under a name, such as `RayEngine` of `plugins/ray`.

    It is a subclass of `silotune.runs.engines.multi_process.MultiProcessEngine` with a context manager `pool(workers,
    address, threads)`, which gives an executor with an attribute `workers`, their number.
    """
    for entry in entry_points(group=ENGINES, name=name):
        return entry.load()
    raise InputError(f"--engine {name}: needs the package silotune-{name}; pip install silotune-{name}")


def _require_importable_script() -> None:
    """Refuse processes where the script that starts them is no file, such as one on standard input."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and file is not None and not os.path.isfile(file):
        raise InputError(
            f"workers: worker processes import the script that starts the run, and {file} is no file (is it read from "
            "stdin?); save the script to a file, or use workers=1"
        )


def end_unguarded_worker() -> None:
    """End this process if it is a worker that imports the main script: the script would start its run once more."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(_UNGUARDED)


@contextmanager
def worker_pool(workers: int, imports: Sequence[str] = ()) -> Iterator[ProcessPoolExecutor]:
    """Start a pool of processes; with several GPUs, the workers take them in turn.

    On Linux they are forked from a server that has imported their modules, so that each starts fast and shares the
    memory of the libraries.

    Args:
        workers: number of processes.
        imports: modules that the workers need.

    Raises:
        SilotuneError: a worker process died.
    """
    end_unguarded_worker()
    context: Any = multiprocessing.get_context("forkserver" if _FORKED else "spawn")
    if _FORKED:
        _serve_forks(imports)
    earlier_children = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, _initialize_worker, (context.Value("i", 0),))
    processes: Any = pool._processes  # filled when the first work is submitted
    try:
        yield pool
    except BrokenProcessPool as error:
        for process in processes.values():
            process.join(_PATIENCE)
        if any(process.exitcode == _UNGUARDED for process in processes.values()):
            raise InputError(
                "workers: worker processes import the script that starts the run; start it under "
                '`if __name__ == "__main__":`, or with workers=1'
            ) from None
        codes = {process.exitcode for process in processes.values()}
        killed = -getattr(signal, "SIGKILL", 9) in codes
        reason = "killed; out of memory?" if killed else "see its own message above"
        raise SilotuneError(f"a worker process ended abruptly ({reason}); run again with --resume") from error
    except BaseException:  # Ctrl-C or a failed task: end the other workers at once; checkpoints stay
        for child in multiprocessing.active_children():
            if child not in earlier_children:
                child.kill()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _serve_forks(imports: Sequence[str]) -> None:
    """Start the server that workers are forked from, and let it import these modules."""
    multiprocessing.set_forkserver_preload(["silotune.core.first_import", *imports, "silotune.core.frozen_imports"])
    resource_tracker.ensure_running()  # else the server starts it, which ends the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _initialize_worker(started: Synchronized[int]) -> None:
    """Set up a worker: ignore `Ctrl-C` (the parent handles it), exit with the parent, choose a GPU.

    A worker that outlived its parent would write into the folders of the next run.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    with started.get_lock():
        number = started.value
        started.value += 1
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
