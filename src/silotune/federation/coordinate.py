"""The coordinator of a federation: who takes part, the handshake, all rounds, the summary. It sees no silo's row."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from silotune import __version__
from silotune.assembly import Federation, build, make_method, read_config
from silotune.backbone import Backbone
from silotune.config import Config, dump
from silotune.data.tasks import SiloData, Splits, Task
from silotune.engines.flower import Flower
from silotune.errors import InputError, SilotuneError
from silotune.experiment import state_digest, summarise
from silotune.federation.agreement import check_federated, travelling
from silotune.federation.handshake import HandshakeRefused, Identity, check_identity, text_digest, tokenizer_digest
from silotune.federation.link import Link, LinkLost
from silotune.federation.protocol import Frame
from silotune.federation.rollcall import RollCall
from silotune.federation.rows import read_rows, read_task
from silotune.interop.start import keep_start
from silotune.parts import digest, flatten
from silotune.pretrained import load_backbone, resolve_precision
from silotune.runs import RunFolder, write_text
from silotune.silo import SiloState

FOLDER = "federation"
"""The part of the run folder that is about the machines: who took part, progress, how it ended."""


@dataclass(frozen=True)
class Job:
    """What a coordinator is to do.

    `config`: the run's configuration file. `out`: the run folder. `silos`: their names, where the configuration does
    not say them. `labelled`: the coordinator's labelled rows. `local`: all silos' folders lie in the run folder.
    """

    config: str
    out: str
    silos: tuple[str, ...] = ()
    labelled: str | None = None
    local: bool = False

    @classmethod
    def read(cls, path: str | Path) -> Job:
        """From a JSON file."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**(fields | {"silos": tuple(fields["silos"])}))

    def write(self, path: Path) -> None:
        """As a JSON file."""
        write_text(path, json.dumps(asdict(self), indent=1))


def coordinate(job: Job, link: Link) -> None:
    """Run a job to its end, and say in `federation/outcome.json` how it ended.

    Raises:
        SilotuneError: what ended it.
    """
    place = Path(job.out) / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    write_text(place / "coordinator.json", json.dumps({"pid": os.getpid()}))
    try:
        _run(job, link)
    except Exception as error:  # told to end, it says nothing: the run is not over
        code = error.exit_code if isinstance(error, SilotuneError) else 1
        text = str(error) if isinstance(error, SilotuneError) else f"{type(error).__name__}: {error}"
        state = "lost" if isinstance(error, LinkLost) else "failed"
        write_text(place / "outcome.json", json.dumps({"state": state, "error": text, "exit_code": code}))
        raise
    write_text(place / "outcome.json", json.dumps({"state": "finished"}))


def settled(config: Config) -> Config:
    """The configuration with what this machine decides: precision and threads.

    Raises:
        InputError: for what a federation of machines cannot do.
    """
    check_federated(config)
    threads = config.threads or torch.get_num_threads()
    return config.model_copy(update={"precision": resolve_precision(config.precision), "threads": threads})


def _run(job: Job, link: Link) -> None:
    out = Path(job.out)
    config = settled(read_config(job.config))
    names = sorted(job.silos or config.federation.silos)
    if not names:
        raise InputError("federation.silos: name the silos that take part")
    method = make_method(config)
    backbone = load_backbone(
        config.backbone,
        precision=config.precision,
        keep_master=method.setting.tuner.trains_backbone,
        model_class=method.setting.head.model_class,
    )
    text = travelling(config, names)
    identity = _identity(config, text, backbone)
    known = _Known.open(out)
    run = {"run": known.run, "config": text, "identity": identity.fields()}
    folder: list[RunFolder] = []

    def report(who: str, what: str) -> None:
        who, what = who[:100], what[:500]  # both may quote what a silo says
        print(f"silotune coordinator: {who}: {what}", flush=True)
        if folder:
            folder[0].event("silo-failed", silo=who, reason=what)

    def admit(frame: Frame) -> None:
        silo = str(frame.fields.get("silo"))
        if frame.kind != "hello":
            raise HandshakeRefused(str(frame.fields.get("reason")))
        check_identity(silo, identity, Identity.read(frame.fields.get("identity")))

    options = config.federation
    calls = RollCall(link, names, Frame("hello", run).encode(), admit, report, options.patience)
    missing = [name for name in calls.gather(options.join) if name not in known.silos]
    if missing:
        raise SilotuneError(
            f"silos that did not join within federation.join={options.join:g} s: {', '.join(missing)}; nothing began"
        )
    known = known.with_hellos(calls.hellos)
    data = [SiloData(name, known.task(name), Splits()) for name in names]
    federation = build(config, backbone, data, _labelled(job, config, bool(method.server_phases())))
    federation.texts = {name: known.texts(name) for name in names}
    shaped = replace(identity, shapes=federation.coordinator.expected.shapes)
    for name, hello in sorted(calls.hellos.items()):
        check_identity(name, shaped, Identity.read(hello.fields["identity"]))
    folder.append(_run_folder(out, federation))
    known.write(out)
    run["identity"] = shaped.fields()
    engine = Flower(federation, folder[0], calls, run, job.local, _Progress(out))
    engine.run()
    _finish(engine, out, job.local)


def _identity(config: Config, text: str, backbone: Backbone) -> Identity:
    return Identity(
        version=__version__,
        config=text_digest(text),
        backbone=backbone.fingerprint,
        tokenizer=tokenizer_digest(backbone),
        precision=backbone.precision,
        method=config.method.name,
    )


def _labelled(job: Job, config: Config, wanted: bool) -> SiloData | None:
    if not wanted:
        return None
    folder = job.labelled or config.federation.labelled
    if folder is None:
        raise InputError(
            f"federation.labelled: method={config.method.name} trains on the coordinator's own labelled rows; give "
            "their folder"
        )
    return read_rows(Path(folder), "coordinator")


def _run_folder(out: Path, federation: Federation) -> RunFolder:
    text, fingerprint = dump(federation.config), federation.backbone.fingerprint
    if (out / "config.yaml").exists():
        return RunFolder.open(out, text, fingerprint)
    folder = RunFolder.create(out, text, fingerprint, resume=True)
    keep_start(out, federation.training)
    return folder


def _finish(engine: Flower, out: Path, local: bool) -> None:
    federation, folder = engine.federation, engine.folder
    final: dict[str, Any] = {"shared_sha256": digest(flatten(federation.coordinator.shared)), "state_sha256": None}
    if local:  # the silos' folders lie here too
        last = folder.latest()
        assert last is not None, "no round was run"
        for name, file in last.silos.items():
            federation.silos[name].state = SiloState.from_flat(folder.read(file))
        final["state_sha256"] = state_digest(federation)
        for silo in federation.silos.values():
            silo.state = None
    best = engine.load_best()
    summary = summarise(engine) | {"engine": engine.label, "best_round": best} | final
    write_text(out / "summary.json", json.dumps(summary, indent=1) + "\n")


@dataclass(frozen=True)
class _Known:
    """The run's id and what silos said of their tasks; a silo may be absent when the coordinator starts again."""

    run: str
    silos: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, out: Path) -> _Known:
        path = out / FOLDER / "run.json"
        if path.exists():
            try:
                fields = json.loads(path.read_text(encoding="utf-8"))
                return cls(str(fields["run"]), dict(fields["silos"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path}: damaged ({error})") from error
        if (out / "checkpoints").is_dir() and any((out / "checkpoints").glob("round-*.json")):
            raise InputError(f"--resume: {out} was not made by this engine; resume it with --engine inprocess")
        return cls(secrets.token_hex(8), {})

    def with_hellos(self, hellos: Mapping[str, Frame]) -> _Known:
        said = {name: {"task": hello.fields["task"], "texts": hello.fields["texts"]} for name, hello in hellos.items()}
        for name, fields in said.items():
            if name in self.silos and dict(self.silos[name]) != fields:
                raise HandshakeRefused(f"silo {name!r}: its task is another than when the run began")
        return _Known(self.run, {**self.silos, **said})

    def task(self, name: str) -> Task:
        try:
            return read_task(self.silos[name]["task"])
        except (ValueError, KeyError, TypeError) as error:
            raise HandshakeRefused(f"silo {name!r}: does not say what its task is") from error

    def texts(self, name: str) -> int:
        texts = self.silos[name]["texts"]
        if type(texts) is not int or not 1 <= texts <= 2:
            raise HandshakeRefused(f"silo {name!r}: a row has one or two texts (it says {texts!r})")
        return texts

    def write(self, out: Path) -> None:
        write_text(out / FOLDER / "run.json", json.dumps({"run": self.run, "silos": dict(self.silos)}, indent=1))


class _Progress:
    """What the coordinator is doing, in a file that others read."""

    def __init__(self, out: Path) -> None:
        self._path = out / FOLDER / "progress.json"

    def __call__(self, number: int, what: str, done: int, total: int) -> None:
        write_text(self._path, json.dumps([number, what, done, total]))
