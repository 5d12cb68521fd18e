"""Processes that work is spread over. They end with their parent, and all at once when one piece of work fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized

from silotune.errors import SilotuneError


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of so many processes, each on a GPU of its own where there are several, in turn.

    Raises:
        SilotuneError: one of them is gone.
    """
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, _begin, (context.Value("i", 0),))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise SilotuneError("a worker process ended abruptly (out of memory?); run again with --resume") from error
    except BaseException:  # Ctrl-C, or work that cannot be done: the others end at once, checkpoints stay
        for child in multiprocessing.active_children():
            if child not in others:
                child.kill()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin(begun: Synchronized[int]) -> None:
    """In a worker: `Ctrl-C` is the parent's, and it ends with the parent, whatever ended that.

    A worker that outlived its parent would write into the folders of the next one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    with begun.get_lock():
        number = begun.value
        begun.value += 1
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
