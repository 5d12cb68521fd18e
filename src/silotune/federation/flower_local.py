"""`--engine flower-local`: a whole federation as processes on this machine, talking over 127.0.0.1 only.

Every silo's rows are put into a folder of its own and its worker reads nothing else; private parts stay in the silos'
folders (which lie in the run folder, because all of them belong to this user).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from silotune.aggregation import AGGREGATIONS
from silotune.assembly import check_data, make_method, sampled_sizes, sampling_groups
from silotune.config import Config, dump
from silotune.coordinator import Coordinator
from silotune.data.labelled import labelled_rows
from silotune.data.loading import load_silos
from silotune.data.metrics import majority_score
from silotune.data.tasks import SiloData
from silotune.engines.base import Progress
from silotune.errors import OR_RESUME, InputError, SilotuneError, require_unused
from silotune.evaluation.instances import FOLDER as INSTANCES
from silotune.federation.agreement import travelling
from silotune.federation.coordinate import FOLDER, Job, settled
from silotune.federation.flower import (
    ENVIRONMENT,
    require_flower,
    submission,
    submitted,
    superexec,
    superlink,
    supernode,
    write_app,
    write_home,
)
from silotune.federation.rows import write_rows
from silotune.federation.supervision import Household, free_ports, lives, wait_for_port
from silotune.methods import Method
from silotune.parts import Scope, names_with
from silotune.privacy.budget import Privacy, make_privacy
from silotune.runs import read_summary, write_text

LOOK = 0.1
"""Seconds between looks at the processes."""
STARTS = 6
"""How often anything is started at most."""
SLOW = 600.0
"""Seconds that Flower, and then the coordinator, has to come up."""

_APART = ("--insecure", "--isolation", "process")
"""SuperLink and SuperNodes start nothing themselves; what runs the apps is started beside them."""
_CLIENT = ("flwr.supernode.cli", "silotune.federation.client_app")
_MODELS = tuple(
    f"transformers.{name}" for name in ("modeling_utils", "models.auto.modeling_auto", "models.auto.tokenization_auto")
)
_SERVER = ("flwr.superlink.cli", "silotune.federation.server_app", "silotune.federation.coordinate", *_MODELS)
"""What ClientApp, any backbone and ServerApp import."""


def run_local(
    config: Config,
    out: Path,
    resume: bool = False,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], Privacy | None]:
    """Run a configuration; its summary, and what it promised.

    Args:
        config: the run's.
        out: the run folder; must be new or empty unless `resume`.
        resume: continue an interrupted run.
        progress: called before every piece of work.
        announce: told, line by line, what the run promises before it starts.

    Raises:
        InputError: bad configuration or data, before any process is started, or found by the coordinator.
        SilotuneError: the run could not be finished; what is finished is in the run folder.
    """
    require_flower()
    if not resume:
        require_unused(out, "--out", OR_RESUME)
    config = settled(config)
    method = make_method(config)
    data = load_silos(config)
    check_data(config, method, data)
    names = [silo.name for silo in data]
    if len(set(map(str.lower, names))) < len(names):
        raise InputError("silos: names that differ in case only cannot be folders everywhere")
    privacy = _privacy(config, method, data)
    if privacy is not None and announce is not None:
        for line in privacy.lines():
            announce(line)
    place = out / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    labelled = None
    if method.server_phases():
        labelled = place / "labelled"
        write_rows(labelled, labelled_rows(data, config.server, _data_seed(config)))
    write_text(place / "config.yaml", dump(config))
    write_text(place / "silos.yaml", travelling(config, names))
    job = Job(str(place / "config.yaml"), str(out), tuple(names), None if labelled is None else str(labelled), True)
    job.write(place / "job.json")
    with tempfile.TemporaryDirectory(prefix="silotune-") as scratch:  # short: sockets' paths may not be long
        environment = {**ENVIRONMENT, "FLWR_HOME": str(Path(scratch) / "flwr")}
        with Household(out / FOLDER / "logs", environment, nursery=True) as household:
            _Local(config, out, data, Path(scratch), household, progress).run()
    return _finished(out, config, data), privacy


class _Local:
    """The processes of one run, and what is done when one of them dies."""

    def __init__(
        self,
        config: Config,
        out: Path,
        data: list[SiloData],
        scratch: Path,
        household: Household,
        progress: Progress | None,
    ) -> None:
        self._config = config
        self._out = out
        self._names = [silo.name for silo in data]
        self._scratch = scratch
        self._household = household
        self._progress = progress or (lambda *_: None)
        self._said = ""
        self._stacks = 0
        self._submitted = 0.0
        for silo in data:
            write_rows(out / "silos" / silo.name / "rows", silo)

    def run(self) -> None:
        """Until the coordinator says how it ended."""
        place = self._out / FOLDER
        self._progress(1, "starting workers and Flower", 0, len(self._names))
        configs = [self._silo_config(number, name) for number, name in enumerate(self._names)]
        self._stack()  # Flower is there before torch is
        for name, path in zip(self._names, configs, strict=True):
            words = [sys.executable, "-m", "silotune.federation.worker", str(path)]
            self._household.start(f"worker-{name}", words, imports=["silotune.federation.session", *_MODELS])
        while True:
            outcome = _read(place / "outcome.json")
            if outcome is not None and not self._lost(outcome):
                break
            self._look_after(place)
            self._tell(place)
            time.sleep(LOOK)
        if outcome["state"] != "finished":
            error = InputError if outcome.get("exit_code") == 2 else SilotuneError
            raise error(str(outcome.get("error")))

    def _silo_config(self, number: int, name: str) -> Path:
        home = self._out / "silos" / name
        tree = {
            "name": name,
            "folder": str((self._out / "checkpoints" / "silos" / name).resolve()),
            "rows": str((home / "rows").resolve()),
            "share": ["validation", "test", "rows", "loss", "seconds"],
            "backbone": self._config.backbone,
            "start": self._config.start,
            "secret": self._config.privacy.secret,
            "seeded_noise": self._config.privacy.secret is None,
            "config": str((self._out / FOLDER / "silos.yaml").resolve()),
            "socket": str(self._socket(number)),
        }
        path = home / "silo.yaml"
        write_text(path, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
        return path

    def _socket(self, number: int) -> Path:
        return self._scratch / f"{number}.sock"

    def _stack(self) -> None:
        """Flower's processes, and the job. A stack that broke is replaced as a whole: the run resumes."""
        while True:
            self._stacks += 1
            if self._stacks > STARTS:
                raise SilotuneError(f"Flower's processes ended {STARTS} times (see {self._out / FOLDER / 'logs'})")
            try:
                self._build()
                return
            except SilotuneError:  # its SuperLink died meanwhile, or another took its port
                if self._stacks >= STARTS or self._household.children["superlink"].alive:
                    raise

    def _build(self) -> None:
        place = self._out / FOLDER
        start, children = self._household.start, self._household.children
        flower = [name for name in children if not name.startswith("worker-")]
        if flower:
            self._household.end(*flower, grace=1.0)  # what counts is on disk
        for name in ("outcome.json", "coordinator.json"):
            (place / name).unlink(missing_ok=True)
        port, *ports = free_ports(1 + len(self._names))
        link = start("superlink", superlink("127.0.0.1", port, _APART))
        for number, (name, own) in enumerate(zip(self._names, ports, strict=True)):
            home = {"FLWR_HOME": str(self._scratch / str(number))}  # apps are unpacked there, by one process at a time
            start(f"supernode-{name}", supernode(f"127.0.0.1:{port}", own, name, self._socket(number), _APART), home)
            start(f"superexec-{name}", superexec(own), home, _CLIENT)
        wait_for_port(link, port, SLOW)
        self._submit(port)
        start("superexec", superexec(port), imports=_SERVER)
        self._submitted = time.monotonic()

    def _submit(self, port: int) -> None:
        write_home(Path(self._household.environment["FLWR_HOME"]), f"127.0.0.1:{port}")
        words = submission(write_app(self._scratch / "app"), self._out / FOLDER / "job.json")
        child = self._household.start("submission", words)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=SLOW)
        self._household.end("submission")
        submitted(child.log.read_text(encoding="utf-8", errors="replace"))
        child.log.unlink()

    def _lost(self, outcome: dict[str, Any]) -> bool:
        """Whether a run ended for want of Flower: then the next stack goes on."""
        if outcome["state"] != "lost" or self._stacks >= STARTS:
            return False
        self._stack()
        return True

    def _look_after(self, place: Path) -> None:
        children = self._household.children
        if not children["superlink"].alive or self._coordinator_died(place):
            self._stack()
            return
        for child in [child for child in children.values() if not child.alive]:
            if child.starts >= STARTS:
                raise SilotuneError(f"{child.name} ended {child.starts} times: {child.tail()}")
            self._household.again(child.name)

    def _coordinator_died(self, place: Path) -> bool:
        said = _read(place / "coordinator.json")
        if said is None:
            return time.monotonic() - self._submitted > SLOW
        return not lives(int(said["pid"])) and not (place / "outcome.json").exists()

    def _tell(self, place: Path) -> None:
        with contextlib.suppress(OSError, ValueError):
            text = (place / "progress.json").read_text(encoding="utf-8")
            if text != self._said:
                self._said = text
                number, what, done, total = json.loads(text)
                self._progress(number, what, done, total)


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return None


def _privacy(config: Config, method: Method, data: list[SiloData]) -> Privacy | None:
    """The coordinator's promise, known before it is there: it follows from the configuration alone."""
    if not names_with(method.parts(), Scope.SHARED):
        return None
    sampling, groups, silos = config.sampling, sampling_groups(config, data), [silo.name for silo in data]
    chooser = Coordinator(
        {}, AGGREGATIONS["uniform"], config.seed, fraction=sampling.fraction, count=sampling.count, groups=groups
    )
    privacy = make_privacy(config, sampled_sizes(config, silos, groups), lambda number: chooser.choose(number, silos))
    if privacy is not None:
        privacy.require_a_round()
    return privacy


def _data_seed(config: Config) -> int:
    return config.seed if config.data.seed is None else config.data.seed


def _finished(out: Path, config: Config, data: list[SiloData]) -> dict[str, Any]:
    """The summary, with what only somebody who sees all rows can say, and the silos' vectors beside it (FedDPA)."""
    summary = read_summary(out)
    if config.partition.name != "none" and summary["global"]:
        test, task = data[0].splits.test, data[0].task
        if task.kind == "classification" and test:
            summary["global"]["majority"] = majority_score(task.metric, torch.tensor([row.label for row in test]))
            write_text(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    for found in _instances(out, [silo.name for silo in data]):
        (out / INSTANCES).mkdir(exist_ok=True)
        shutil.copyfile(found, out / INSTANCES / found.name)
    return summary


def _instances(out: Path, names: list[str]) -> Iterator[Path]:
    run = _read(out / FOLDER / "run.json")
    for name in names if run else []:
        found = out / "checkpoints" / "silos" / name / str(run and run["run"]) / INSTANCES / f"{name}.safetensors"
        if found.is_file():
            yield found
