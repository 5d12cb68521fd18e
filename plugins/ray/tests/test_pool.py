"""The pool over a stand-in for Ray that runs tasks in this process: how many run at a time, what is raised, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from silotune_ray import RayPool

from silotune.errors import SilotuneError


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(f"a traceback\n{cause}")
        self.cause = cause


class NodeDiedError(RayError):
    pass


class FakeRay:
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, gpus: int = 0) -> None:
        self.gpus = gpus
        self.options: dict[str, Any] = {}
        self.ended = threading.Event()
        self._processes = ThreadPoolExecutor()

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": self.gpus} if self.gpus else {}

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        self.options = options
        return lambda call: SimpleNamespace(remote=lambda *arguments: self._processes.submit(call, *arguments))

    def get(self, task: Any) -> Any:
        try:
            return task.result()
        except RayError:
            raise
        except Exception as error:
            raise RayTaskError(error) from error

    def cancel(self, task: Any, force: bool) -> None:
        assert force
        self.ended.set()


def lose() -> None:
    raise NodeDiedError("the machine is gone\nand more")


def test_no_more_tasks_run_than_there_are_workers() -> None:
    running: list[int] = []
    most: list[int] = []

    def work(number: int) -> int:
        running.append(number)
        most.append(len(running))
        time.sleep(0.01)
        running.remove(number)
        return number

    with RayPool(FakeRay(), 2, 1) as pool:
        assert [result.result(20) for result in [pool.submit(work, n) for n in range(8)]] == [*range(8)]
    assert max(most) <= 2


def test_errors_are_those_of_the_function_and_a_loss_is_one_line() -> None:
    with RayPool(FakeRay(), 1, 1) as pool:
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 1, 0).result(20)
        with pytest.raises(SilotuneError) as error:
            pool.submit(lose).result(20)
        assert pool.submit(abs, -1).result(20) == 1
    assert str(error.value) == (
        "work was lost on the cluster (NodeDiedError: the machine is gone); run again with --resume"
    )


@pytest.mark.parametrize(("gpus", "workers", "share"), [(0, 3, 0), (4, 2, 2), (2, 5, 1 / 3)])
def test_workers_share_the_gpus_and_keep_their_processes(gpus: int, workers: int, share: float) -> None:
    ray = FakeRay(gpus)
    with RayPool(ray, workers, 4):
        assert (ray.options["num_gpus"], ray.options["num_cpus"], ray.options["max_calls"]) == (share, 4, 0)


def test_an_end_before_the_work_is_done_ends_the_tasks() -> None:
    ray = FakeRay()
    begun = threading.Event()

    def work() -> bool:
        begun.set()
        return ray.ended.wait(60)

    with RayPool(ray, 1, 1) as pool:
        first, second = pool.submit(work), pool.submit(time.sleep, 60)
        begun.wait(20)
    assert first.result(20)
    assert second.cancelled()
