"""How many files somebody reads who follows one update over Flower: from the request at the silo to the aggregate."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import silotune
from silotune.aggregation.update import Update
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.dispatcher import SiloDispatcher
from silotune.distributed.coordinator.engine import FlowerEngine
from silotune.distributed.flower.link import Arrival
from silotune.distributed.protocol.frames import Frame, decode
from silotune.distributed.silo.store import Answer
from silotune.training.client import SiloReply
from silotune.training.coordinator import Coordinator, Received
from silotune.training.local_round import LocalResult
from silotune.training.local_trainer import LocalTrainer
from tests.support.session_rig import DirectLink, answering, job, local_configs

FORMS = (LocalResult, SiloReply, Answer, Frame, Arrival, Received, Update)
ROOT = Path(silotune.__file__).parent

UNSEEN = (
    *("distributed/flower/client_app.py", "distributed/flower/frame_message.py", "distributed/flower/link.py"),
    *("distributed/silo/worker.py", "distributed/coordinator/coordinate.py"),
)
"""Files that carry an update's bytes through Flower and sockets, which are not there in this process."""


class Walk:
    """Notes the files in which a function takes or returns an update or request in one of its forms."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def note(self, frame, event, value) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(ROOT):
            return
        code = frame.f_code
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        for each in given if event == "call" else [value]:
            if isinstance(each, FORMS) or (isinstance(each, bytes) and len(each) > 200):
                self.files.add(str(path.relative_to(ROOT)))

    def during(self, function, profile=True):
        """Return the function with this walk on, or with none, while it runs."""

        def walked(*args, **options):
            before = sys.getprofile()
            sys.setprofile(self.note if profile else None)
            try:
                return function(*args, **options)
            finally:
                sys.setprofile(before)

        return walked


def test_an_update_passes_few_files(tiny_config, tmp_path, monkeypatch):
    """The training itself is left out: it is the same in every engine."""
    walk = Walk()
    monkeypatch.setattr(LocalTrainer, "rounds", walk.during(LocalTrainer.rounds, profile=False))
    for owner, name in ((SiloDispatcher, "_handle"), (FlowerEngine, "_read"), (Coordinator, "read_reply")):
        monkeypatch.setattr(owner, name, walk.during(inspect.getattr_static(owner, name)))
    config = tiny_config("fedavg", "rounds=2", "train.steps=1")
    configs = local_configs(config, tmp_path / "run")

    def silo(answer):
        return lambda data: (walk.during(answer) if decode(data).kind == "round" else answer)(data)

    coordinate(job(config, tmp_path / "run", configs), DirectLink({n: silo(a) for n, a in answering(configs).items()}))
    assert all((ROOT / path).exists() for path in UNSEEN)
    files = walk.files | set(UNSEEN)
    assert 15 < len(files) <= 25, "\n".join(sorted(files))
