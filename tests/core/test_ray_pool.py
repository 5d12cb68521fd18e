"""The pool over a stand-in for Ray whose actors are threads: losses, cancelled work, shutting down."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

import pytest

from silotune.core.ray_pool import RayPool
from silotune.core.work_queue import Piece
from silotune.errors import SilotuneError

HERE = threading.local()
"""`actor`: the one whose call this thread makes."""


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class OutOfMemoryError(RayError):
    pass


class RaySystemError(RayError):
    pass


class Actor:
    """A thread that makes calls in turn; `kill` loses it, whatever it does."""

    def __init__(self, placed: bool) -> None:
        self.call = SimpleNamespace(remote=self._submit)
        self.dead = False
        self._calls: queue.Queue[Any] = queue.Queue()
        if placed:
            threading.Thread(target=self._serve, daemon=True).start()

    def _submit(self, *call: Any) -> Any:
        result: Future[Any] = Future()
        self._calls.put((result, call))
        return SimpleNamespace(future=lambda: result)

    def _serve(self) -> None:
        while True:
            result, (function, args, kwargs) = self._calls.get()
            done: Future[Any] = Future()
            if not self.dead:
                threading.Thread(target=self._work, args=(done, function, args, kwargs), daemon=True).start()
            while not self.dead and not done.done():
                time.sleep(0.002)
            if self.dead:
                result.set_exception(OutOfMemoryError("killed"))
            elif error := done.exception():
                result.set_exception(error)
            else:
                result.set_result(done.result())

    def _work(self, done: Future[Any], function: Any, args: Any, kwargs: Any) -> None:
        HERE.actor = self
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)


class FakeRay:
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, RaySystemError=RaySystemError)

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.places = 100

    def cluster_resources(self) -> dict[str, float]:
        return {}

    def remote(self, kind: Any) -> Any:
        def made(*_: Any) -> Actor:
            self.actors.append(Actor(placed=len(self.actors) < self.places))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made))

    def kill(self, actor: Actor) -> None:
        actor.dead = True


def pool_of(workers: int, copies: bool = False) -> tuple[FakeRay, RayPool]:
    ray = FakeRay()
    return ray, RayPool(ray, workers, 1, copies)


def test_a_lost_worker_s_work_is_done_by_another_whatever_ray_calls_the_loss():
    ray, pool = pool_of(2)
    results = [pool.submit(time.sleep, 0.3), pool.submit(abs, -2)]
    time.sleep(0.1)
    ray.actors[0].dead = True
    assert [result.result(20) for result in results] == [None, 2]
    assert [pool.submit(abs, -number).result(20) for number in range(8)] == [*range(8)]


def test_many_idle_workers_that_are_lost_cost_no_work():
    ray, pool = pool_of(16)
    for actor in ray.actors[:12]:
        actor.dead = True
    assert [pool.submit(abs, -number).result(20) for number in range(8)] == [*range(8)]


def test_work_that_ends_its_workers_ends_no_more_than_four():
    ray, pool = pool_of(8)

    def fatal() -> None:
        HERE.actor.dead = True
        time.sleep(60)

    with pytest.raises(SilotuneError, match="4 workers with the same work were lost"):
        pool.submit(fatal).result(20)
    assert sum(actor.dead for actor in ray.actors) == 4
    assert pool.submit(abs, -3).result(20) == 3


def test_where_all_workers_are_lost_whoever_waits_knows():
    ray, pool = pool_of(2)
    results = [pool.submit(time.sleep, 60) for _ in range(4)]
    for actor in ray.actors:
        actor.dead = True
    for result in results:
        with pytest.raises(SilotuneError, match=r"all workers of the cluster are lost \(OutOfMemoryError: killed\)"):
            result.result(20)


def test_errors_of_the_function_are_its_own():
    _, pool = pool_of(1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(20)
    assert pool.submit(abs, -1).result(20) == 1


def test_an_error_about_a_result_costs_no_worker():
    ray, pool = pool_of(2)

    def unreadable() -> None:
        raise RaySystemError("cannot be deserialized")

    with pytest.raises(RaySystemError):
        pool.submit(unreadable).result(20)
    assert not any(actor.dead for actor in ray.actors)


def test_a_piece_that_is_finished_before_its_copy_begins_is_left():
    _, pool = pool_of(1)
    finished = Piece((abs, (-1,), {}), done=True)
    finished.result.set_result(1)
    with pool._changed:
        pool._queue.add(finished)
        pool._changed.notify()
    assert pool.submit(abs, -2).result(20) == 2


def test_cancelled_work_that_is_dropped_keeps_nobody_waiting():
    _, pool = pool_of(1)
    results = [pool.submit(time.sleep, 60), pool.submit(abs, -1)]
    time.sleep(0.05)
    assert results[1].cancel()
    pool.shutdown()
    assert not wait(results, timeout=5).not_done


def test_a_worker_without_a_place_is_given_nothing():
    ray = FakeRay()
    ray.places = 1
    pool = RayPool(ray, 3, 1, False)
    assert [pool.submit(abs, -number).result(20) for number in range(4)] == [*range(4)]


def test_cancelled_work_is_not_begun_and_the_rest_goes_on():
    _, pool = pool_of(1)
    begun: list[int] = []
    first = pool.submit(time.sleep, 0.2)
    time.sleep(0.05)
    second, third = pool.submit(begun.append, 2), pool.submit(begun.append, 3)
    assert second.cancel()
    assert not first.cancel()
    third.result(20)
    assert begun == [3]


def test_shutting_down_ends_all_waiting():
    _, pool = pool_of(2)
    results = [pool.submit(time.sleep, 60) for _ in range(3)]
    time.sleep(0.05)
    pool.shutdown()
    for result in results:
        with pytest.raises(SilotuneError, match="ended before they had finished"):
            result.result(20)
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(abs, -1)


def test_a_stalled_worker_s_work_is_copied_and_its_own_result_comes_too_late():
    _, pool = pool_of(2, copies=True)
    pool.submit(time.sleep, 0.01).result(20)
    calls: list[int] = []

    def slow_at_first() -> int:
        calls.append(len(calls))
        time.sleep(4 if calls == [0] else 0)
        return len(calls)

    begin = time.monotonic()
    assert pool.submit(slow_at_first).result(20) == 2
    assert time.monotonic() - begin < 3.5
