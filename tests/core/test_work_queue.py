"""Which piece of work a worker is given: one that waits, one of a lost worker, or a copy of one that takes long."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from silotune.core.work_queue import Piece, WorkQueue


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def given(queue: WorkQueue) -> list[tuple[int, str]]:
    """Start all that can start now: (worker, the piece's name)."""
    return [(worker, piece.call[0]) for worker, piece in iter(queue.next_start, None)]


def queue_of(workers: int, names: str, copies: bool = True) -> tuple[WorkQueue, Clock]:
    clock = Clock()
    queue = WorkQueue(range(workers), copies, clock)
    for name in names:
        queue.add(Piece((name,)))
    return queue, clock


def copied() -> tuple[WorkQueue, Clock]:
    """Worker 0 took 4 s for its piece, and at 8 s is given a copy of worker 1's."""
    queue, clock = queue_of(2, "ab")
    given(queue)
    clock.now = 4.0
    queue.finished(0)
    clock.now = 8.0
    assert given(queue) == [(0, "b")]
    return queue, clock


def test_workers_take_pieces_in_order_one_each():
    queue, _ = queue_of(2, "abc")
    assert given(queue) == [(0, "a"), (1, "b")]
    assert queue.finished(1)[0].call == ("b",)
    assert given(queue) == [(1, "c")]
    assert queue.seconds_to_wait() is None  # no worker is idle


def test_an_idle_worker_copies_a_piece_that_takes_twice_the_longest():
    queue, clock = queue_of(3, "abc")
    given(queue)
    clock.now = 10.0
    queue.finished(0)
    clock.now = 12.0
    queue.finished(2)
    assert given(queue) == []
    assert queue.seconds_to_wait() == pytest.approx(12.0)  # 2 × 12 s after its begin at 0
    clock.now = 24.0
    assert given(queue) == [(0, "b")]  # one copy at a time, although another worker is idle
    assert queue.seconds_to_wait() == pytest.approx(24.0)
    clock.now = 25.0
    piece, first = queue.finished(0)
    assert (piece.call, first) == (("b",), True)
    piece, first = queue.finished(1)
    assert (piece.call, first) == (("b",), False)
    assert given(queue) == []


def test_short_pieces_are_not_overdue_within_a_second():
    queue, clock = queue_of(2, "ab")
    given(queue)
    clock.now = 0.01
    queue.finished(0)
    assert queue.seconds_to_wait() == pytest.approx(0.99)


def test_what_a_copy_took_does_not_move_the_bound():
    queue, clock = copied()
    clock.now = 9.0
    queue.finished(0)
    clock.now = 100.0
    queue.finished(1)  # the slow one, after its copy
    queue.add(Piece(("c",)))
    assert len(given(queue)) == 1
    assert queue.seconds_to_wait() == pytest.approx(8.0)


def test_a_piece_that_took_long_with_its_first_worker_is_known_to_take_long():
    queue, clock = copied()
    clock.now = 30.0
    queue.finished(1)  # the first worker is done before its copy
    queue.add(Piece(("c",)))
    given(queue)
    queue.finished(0)
    assert queue.seconds_to_wait() == pytest.approx(60.0)


def test_where_a_copy_stalls_too_there_is_another_and_no_more_than_three():
    queue, clock = queue_of(5, "ab")
    given(queue)
    clock.now = 1.0
    queue.finished(0)
    starts = []
    for clock.now in range(2, 100):
        starts += given(queue)
    assert [name for _, name in starts] == ["b", "b"]
    assert queue.seconds_to_wait() is None


def test_doubted_workers_are_given_nothing_until_they_answer():
    queue, _ = queue_of(3, "a")
    given(queue)
    queue.add(queue.lost(0), first=True)
    assert queue.doubt_idle() == [1, 2]
    assert given(queue) == []
    assert queue.workers == 2
    queue.answered(1, alive=False)
    queue.answered(2, alive=True)
    assert queue.workers == 1
    assert given(queue) == [(2, "a")]


def test_a_piece_that_nobody_waits_for_leaves_its_worker_free():
    queue, _ = queue_of(1, "ab")
    given(queue)
    queue.released(0)
    assert given(queue) == [(0, "b")]


@pytest.mark.parametrize("copies", [True, False])
def test_without_leave_or_without_anything_finished_nothing_is_copied(copies):
    queue, clock = queue_of(2, "a", copies)
    given(queue)
    clock.now = 1e6
    assert given(queue) == []
    assert queue.seconds_to_wait() is None
    if not copies:
        queue.add(Piece(("b",)))
        given(queue)
        queue.finished(1)
        assert given(queue) == []


def test_a_lost_worker_s_piece_is_left_to_its_copy():
    queue, clock = queue_of(2, "ab")
    given(queue)
    clock.now = 1.0
    queue.finished(0)
    clock.now = 50.0
    assert given(queue) == [(0, "b")]
    piece = queue.lost(1)
    assert (piece.losses, piece.abandoned, queue.workers) == (1, False, 1)
    piece = queue.lost(0)
    assert (piece.losses, piece.abandoned, queue.workers) == (2, True, 0)


def test_a_piece_that_was_lost_comes_before_all_others():
    queue, _ = queue_of(2, "abc")
    given(queue)
    queue.add(queue.lost(0), first=True)
    queue.finished(1)
    assert given(queue) == [(1, "a")]
    assert [piece.call for piece in queue.drop_unfinished(waiting_alone=True)] == [("c",)]
    assert [piece.call for piece in queue.drop_unfinished()] == [("a",)]
    assert queue.drop_unfinished() == []
