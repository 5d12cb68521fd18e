"""`ray_pool`: workers on a Ray cluster (`--engine ray`), as a pool to which work is submitted; extra `ray`."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from silotune.core.work_queue import Piece, WorkQueue
from silotune.errors import InputError, SilotuneError

LOCAL = "local"
"""The address at which there is no cluster: one is started on this machine, and ends with the run."""

_ASKED: tuple[Any, ...] = (int, (), {})
"""What a worker is called with to learn whether it is there."""

_NO_LOSS = (
    "RayTaskError",
    "UnserializableException",
    "RaySystemError",
    "ObjectStoreFullError",
    "OutOfDiskError",
    "TaskCancelledError",
    "CrossLanguageError",
)
"""Errors of Ray's that are not about a worker."""

_TRIES = 4
"""How many workers a piece of work may be given; one that needs too much memory must not end them all."""


@contextmanager
def ray_pool(workers: int, address: str, threads: int | None = None, copies: bool = False) -> Iterator[RayPool]:
    """Start workers on a cluster, each an actor with cores (and a share of the GPUs) of its own.

    Work that is lost with a machine is done again on the others. The workers need silotune, the backbone and the rows
    under the same paths.

    Args:
        workers: number of workers; 0: as many as the cluster has cores for.
        address: the cluster's, as `ray.init` takes it (`auto`, `host:port`, `ray://host:port`); or `LOCAL`.
        threads: PyTorch's threads in a worker, and its cores; None: as many as this process has. Bits depend on it.
        copies: whether a worker with nothing to do does the work of a slow one, too, and the first result counts; the
            work must then have no effect but its result.

    Raises:
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
        pool = RayPool(ray, _number(ray, workers, cores), cores, copies)
        yield pool
    finally:
        if pool is not None:
            pool.shutdown()
        if begun:
            ray.shutdown()


class RayPool(Executor):
    """Actors with one piece of work each; the others wait.

    Args:
        ray: the module.
        workers: number of actors.
        cores: of each.
        copies: whether idle actors copy the work of slow ones (`WorkQueue`).
    """

    def __init__(self, ray: Any, workers: int, cores: int, copies: bool) -> None:
        self.workers = workers
        self._ray = ray
        gpus = ray.cluster_resources().get("GPU", 0)
        share = gpus // workers or 1 / math.ceil(workers / gpus) if gpus else 0  # one lies on one GPU
        actor = ray.remote(_Worker).options(
            num_cpus=cores,
            num_gpus=share,
            scheduling_strategy="SPREAD",
        )
        self._actors = [actor.remote(cores) for _ in range(workers)]
        self._queue = WorkQueue(range(workers), copies)
        self._lost: list[int] = []
        """Workers that were lost and are to be ended, in case they are not."""
        self._reason: BaseException | None = None
        """Of the last loss."""
        self._ended = False
        self._changed = threading.Condition()
        self._giving = threading.Thread(target=self._give, daemon=True)
        self._giving.start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a worker call a function of an installed module; its errors are those of the function."""
        piece = Piece((function, args, kwargs))
        with self._changed:
            if self._ended:
                raise RuntimeError("the pool was shut down")
            self._queue.add(piece)
            refused = self._refused()
            self._changed.notify()
        self._refuse(refused)
        return piece.result

    def _give(self) -> None:
        """Give work to workers that have none, in a thread of its own: Ray's own threads may not wait for Ray."""
        with self._changed:
            begun = self._queue.doubt_idle()  # one that finds no room on the cluster is given nothing
        for worker in begun:
            self._call(worker, _ASKED, self._answer)
        while True:
            doubted: list[int] = []
            with self._changed:
                while not self._ended and not self._lost and (start := self._queue.next_start()) is None:
                    self._changed.wait(self._queue.seconds_to_wait())
                if self._ended:
                    return
                lost, self._lost = self._lost, []
                if lost:  # with its machine others may be lost that have nothing to do
                    doubted, start = self._queue.doubt_idle(), None
            for worker in lost:
                self._kill(worker)
            for worker in doubted:
                self._call(worker, _ASKED, self._answer)
            if start is not None:
                self._begin(*start)

    def _begin(self, worker: int, piece: Piece) -> None:
        """Send a piece to a worker, unless it is finished by now or whoever submitted it has cancelled it."""
        with self._changed:
            if piece.done or not (piece.result.running() or piece.result.set_running_or_notify_cancel()):
                self._queue.released(worker)
                return
        self._call(worker, piece.call, self._finish)

    def _call(self, worker: int, call: tuple[Any, ...], then: Callable[[int, Future[Any]], None]) -> None:
        try:
            called = self._actors[worker].call.remote(*call).future()
        except Exception as error:  # what cannot be sent, say; whoever waits is to know
            called = Future()
            called.set_exception(_NotSent(error))
        called.add_done_callback(partial(then, worker))

    def _answer(self, worker: int, called: Future[Any]) -> None:
        """Take the answer of a worker that was asked whether it is there."""
        error = called.exception()
        with self._changed:
            self._queue.answered(worker, error is None)
            if error is not None:
                self._lost.append(worker)
                self._reason = error
            refused = self._refused()
            self._changed.notify()
        self._refuse(refused)

    def _finish(self, worker: int, called: Future[Any]) -> None:
        """Take what a worker's call returned or raised; of copies, what the first did."""
        error, hopeless = called.exception(), []
        with self._changed:
            if self._is_loss(error):
                piece, first = self._queue.lost(worker), False
                self._lost.append(worker)
                self._reason = error
                if piece.abandoned and piece.losses < _TRIES:
                    self._queue.add(piece, first=True)
                elif piece.abandoned:
                    piece.done, hopeless = True, [piece]
            else:
                piece, first = self._queue.finished(worker)
            refused = self._refused()
            self._changed.notify()
        # outside the lock: whoever waits for the result may submit more
        if first and error is None:
            _settle(piece, called.result())
        elif first:  # Ray's error has the worker's traceback as its text, the cause is what was raised
            _settle(piece, error=getattr(error, "cause", None) or error)
        self._refuse(hopeless, f"{_TRIES} workers with the same work were")
        self._refuse(refused)

    def _is_loss(self, error: BaseException | None) -> bool:
        """Return whether an error says that a worker is lost; others are of the function, its result or its sending."""
        errors = self._ray.exceptions
        return isinstance(error, errors.RayError) and not isinstance(
            error, tuple(getattr(errors, name) for name in _NO_LOSS if hasattr(errors, name))
        )

    def _refused(self) -> list[Piece]:
        """Return the pieces that no worker is left for."""
        return [] if self._queue.workers else self._queue.drop_unfinished(waiting_alone=True)

    def _refuse(self, pieces: list[Piece], lost: str = "all workers of the cluster are") -> None:
        """Let whoever waits for work know that it will not be done."""
        reason = f"{type(self._reason).__name__}: {str(self._reason).strip().partition(chr(10))[0][:200]}"
        for piece in pieces:
            _settle(piece, error=SilotuneError(f"{lost} lost ({reason}); run again with --resume"))

    def _kill(self, worker: int) -> None:
        """End a worker with what it does; one that is gone cannot be."""
        with suppress(Exception):
            self._ray.kill(self._actors[worker])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers at once, with what they do."""
        with self._changed:
            self._ended = True
            unfinished = self._queue.drop_unfinished()
            self._changed.notify()
        for piece in unfinished:
            _settle(piece, error=SilotuneError("the workers were ended before they had finished"))
        for worker in range(self.workers):
            self._kill(worker)
        if threading.current_thread() is not self._giving:
            self._giving.join(timeout=10)  # it may not call Ray after Ray is shut down


def _settle(piece: Piece, value: Any = None, error: BaseException | None = None) -> None:
    """Give a piece's result to whoever waits for it, unless they have cancelled it."""
    if piece.result.cancelled():
        with suppress(RuntimeError, InvalidStateError):
            piece.result.set_running_or_notify_cancel()  # who waits for several is told
        return
    with suppress(InvalidStateError):
        if error is None:
            piece.result.set_result(value)
        else:
            piece.result.set_exception(error)


class _NotSent(Exception):
    """A call was not sent; the cause says why."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Worker:
    """An actor: a process on a machine of the cluster."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function."""
        return function(*args, **kwargs)


def _connect(ray: Any, address: str) -> None:
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


def _number(ray: Any, workers: int, cores: int) -> int:
    """Return the number of workers."""
    # A worker's cores are those of one machine.
    most = sum(int(node["Resources"].get("CPU", 0)) // cores for node in ray.nodes() if node["Alive"])
    if workers > most or not most:
        raise InputError(
            f"--workers {max(workers, 1)}: the cluster has cores for {most} of threads={cores}; allowed: "
            + (f"1 to {most}, or fewer threads" if most else "fewer threads")
        )
    return workers or most
