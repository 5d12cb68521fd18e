"""`run --track tensorboard`: TensorBoard finds what the event log says, once a round, after a resume too."""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path

import pytest

from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.session import Session
from silotune.runs.callbacks.base import EventFeed
from silotune.runs.callbacks.trackers import TensorBoard
from silotune.runs.run import run
from silotune.runs.storage.readers import events
from tests.support.command_line import Silotune, tree
from tests.support.method_cases import logged
from tests.support.session_rig import DirectLink, job, local_configs

pytest.importorskip("tensorboard")
WORDS = ("run", "federation.yaml", "rounds=3", "method=fedmcp", "--out", "out")
TRACK = ("--track", "tensorboard")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def check(folder: Path, rounds: int) -> None:
    written = scalars(folder)
    silos = logged(folder, "silo")
    for name in ("north", "south"):
        own = [event for event in silos if event["silo"] == name]
        assert [event["round"] for event in own] == list(range(1, rounds + 1))
        for key in ("loss", "contrastive", "similarity_private", "bytes_up", "bytes_down"):
            assert written[f"{key}/{name}"] == [(e["round"], pytest.approx(e[key], rel=1e-6)) for e in own]
        scores = [(e["round"], pytest.approx(e["validation"][name], rel=1e-6)) for e in logged(folder, "round")]
        assert written[f"validation/{name}"] == scores
    means = [(e["round"], pytest.approx(statistics.fmean(e["validation"].values()))) for e in logged(folder, "round")]
    assert written["validation/mean over silos"] == means
    assert not any(tag.startswith(("seconds", "rows", "real_tokens")) for tag in written)


def test_it_changes_nothing_of_a_run_and_a_refused_one_leaves_everything_alone(silotune: Silotune, place: Path) -> None:
    words = ("run", "federation.yaml", "--out")
    assert silotune(*words, "out", *TRACK).code == 0
    assert silotune(*words, "plain").code == 0
    plain, shown = tree(place / "plain"), tree(place / "out")
    assert set(shown) - set(plain) == {name for name in shown if name.startswith("tensorboard")}
    one, other = (json.loads(found["summary.json"])["state_sha256"] for found in (plain, shown))
    assert one == other
    before = tree(place)
    for more in ((), ("--resume", "train.lr=0.5")):
        assert silotune(*words, "out", *TRACK, *more).code == 2
        assert tree(place) == before


class Killed(BaseException):
    pass


def test_each_round_is_there_while_it_runs_and_once_after_a_resume(silotune: Silotune, place: Path) -> None:
    def kill(number: int, what: str, done: int, total: int) -> None:
        if number == 3 and done == 1:
            assert [step for step, _ in scalars(place / "out")["loss/north"]] == [1, 2]
            raise Killed

    words = [word for word in WORDS[2:] if "=" in word]
    with pytest.raises(Killed):
        run("federation.yaml", *words, out="out", progress=kill, callbacks=[TensorBoard()])
    (place / "out" / "tensorboard" / "notes.txt").write_text("mine")
    assert silotune(*WORDS, "--resume", *TRACK).code == 0
    check(place / "out", 3)
    assert (place / "out" / "tensorboard" / "notes.txt").exists()
    # of a run that was finished without it, and again of one that has it
    for _ in range(2):
        assert silotune(*WORDS, "--resume", *TRACK).code == 0
        check(place / "out", 3)


def test_a_federation_logs_a_round_when_the_next_one_is_trained(tiny_config, tmp_path: Path) -> None:
    """Written while it runs, from a log in which a round's losses come before the scores of the round before."""
    config, out = tiny_config("fedmcp", "rounds=3", "train.steps=1"), tmp_path / "out"
    configs = local_configs(config, out)
    with EventFeed(out, 3, [TensorBoard()]) as progress:

        def watched(session: Session, data: bytes) -> bytes:
            if (number := decode(data).fields.get("round")) and (out / "events.jsonl").exists():
                progress(number, "", 0, 3)
            return session.answer(data)

        sessions = [Session(local) for local in configs.values()]
        link = DirectLink({node: partial(watched, session) for node, session in enumerate(sessions)})
        coordinate(job(config, out, configs), link)
    written = scalars(out)
    order = [(event["event"], event["round"]) for event in events(out)]
    assert order.index(("silo", 2)) < order.index(("round", 1))
    for name in configs:
        for key in ("loss", "bytes_up"):
            own = [(e["round"], pytest.approx(e[key], rel=1e-6)) for e in logged(out, "silo") if e["silo"] == name]
            assert len(own) == 3
            assert written[f"{key}/{name}"] == own
        own = [(e["round"], pytest.approx(e["validation"][name], rel=1e-6)) for e in logged(out, "round")]
        assert written[f"validation/{name}"] == own


def test_partitioned_and_server_phases(tiny_config, tmp_path: Path) -> None:
    """FedFAME over one partitioned data set: one score for all silos, and what the coordinator trains."""
    run(tiny_config("fedfame"), out=tmp_path / "out", callbacks=[TensorBoard()])
    written = scalars(tmp_path / "out")
    scores = [
        (e["round"], pytest.approx(e["validation"]["global"], rel=1e-6)) for e in logged(tmp_path / "out", "round")
    ]
    assert written["validation/global"] == scores
    assert "validation/mean over silos" not in written
    assert [step for step, _ in written["loss/coordinator"]] == [1, 2]


def test_nothing_is_written_before_the_run_folder_is_made(tmp_path: Path) -> None:
    """Who makes it (a federation's coordinator, in another process) wants it empty."""
    with EventFeed(tmp_path / "out", 3, [TensorBoard()]) as progress:
        progress(1, "starting", 0, 2)
    assert not (tmp_path / "out").exists()
