"""How many files somebody reads who follows one update over Flower: from the request at the silo to the aggregate."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import silotune
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.dispatcher import SiloDispatcher
from silotune.distributed.coordinator.engine import FlowerEngine
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo import local_work
from silotune.training.coordinator import Coordinator
from silotune.training.local_trainer import LocalTrainer
from tests.support.session_rig import DirectLink, answering, job, local_configs

ROOT = Path(silotune.__file__).parent

UNSEEN = (*("distributed/flower/client_app.py", "distributed/flower/link.py", "distributed/silo/worker.py"),)
"""Files that carry an update's bytes through Flower and sockets, which are not there in this process."""


class Walk:
    """Notes the files of this package in which a function is called."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}

    def note(self, frame, event, _value) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            self.files.setdefault(str(path.relative_to(ROOT)), set()).add(frame.f_code.co_name)

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
    """Without the training itself, which is the same in every engine, and the first round, which sets a silo up."""
    walk = Walk()
    monkeypatch.setattr(LocalTrainer, "rounds", walk.during(LocalTrainer.rounds, profile=False))
    monkeypatch.setattr(local_work, "score_silos", walk.during(local_work.score_silos, profile=False))
    config = tiny_config("fedavg", "rounds=2", "train.steps=1")
    configs = local_configs(config, tmp_path / "run")
    begun = []

    def silo(answer):
        def answered(data):
            frame = decode(data)
            if frame.kind != "round" or frame.fields["round"] < 2:
                return answer(data)
            if not begun:
                for owner, name in ((SiloDispatcher, "_handle"), (FlowerEngine, "_read"), (Coordinator, "read_reply")):
                    monkeypatch.setattr(owner, name, walk.during(inspect.getattr_static(owner, name)))
                begun.append(True)
            return walk.during(answer)(data)

        return answered

    coordinate(job(config, tmp_path / "run", configs), DirectLink({n: silo(a) for n, a in answering(configs).items()}))
    assert all((ROOT / path).exists() for path in UNSEEN)
    files = {*walk.files, *UNSEEN}
    shown = "\n".join(f"{path}: {walk.files.get(path)}" for path in sorted(files))
    assert len(files) <= 29, shown
    assert 15 < sum(not path.startswith("core/") for path in files) <= 22, shown
