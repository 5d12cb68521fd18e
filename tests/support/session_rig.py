"""A federation without Flower: sessions answer in this process or in threads, over a link that records all messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from silotune.config import Config, dump
from silotune.data.loading import draw_labeled_rows, load_silos
from silotune.data.row_folder import write_rows
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.job import CoordinatorJob
from silotune.distributed.flower.link import Arrival
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.silo_config import REHEARSAL, SiloSettings
from silotune.runs.storage.readers import read_summary

ALL = ["validation", "test", "rows", "loss", "seconds"]
Silo = Callable[[bytes], bytes]


@dataclass
class DirectLink:
    """A link whose nodes are functions; an answer is there at the next pull. `joined` may change at any time."""

    joined: dict[int, Silo]
    names: dict[int, str] = field(default_factory=dict)
    sent: list[tuple[int, bytes]] = field(default_factory=list)
    came: list[tuple[int, bytes]] = field(default_factory=list)
    _ready: dict[str, Arrival] = field(default_factory=dict)

    def nodes(self) -> Mapping[int, str]:
        return {node: self.names.get(node, "") for node in self.joined}

    def push(self, node: int, data: bytes) -> str | None:
        message = f"m{len(self.sent)}"
        self.sent.append((node, data))
        try:
            answer = self.joined[node](data)
        except LostError:
            return message  # it never answers
        self.came.append((node, answer))
        self._ready[message] = Arrival(message, answer)
        return message

    def pull(self, messages: Collection[str]) -> Sequence[Arrival]:
        return [self._ready.pop(message) for message in list(messages) if message in self._ready]


class LostError(Exception):
    """The message is lost."""


def local_configs(config: Config, out: Path, **more: object) -> dict[str, SiloSettings]:
    """Write each silo's rows to its own folder and return its settings, laid out as `flower-local` does."""
    settings = {}
    for data in load_silos(config):
        home = out / "silos" / data.name
        write_rows(home / "rows", data, declared=True)
        settings[data.name] = SiloSettings(
            **{
                "name": data.name,
                "folder": str(out / "checkpoints" / "silos" / data.name),
                "rows": str(home / "rows"),
                "share": ALL,
                "backbone": config.backbone.name,
                "socket": "/tmp/unused.sock",
                "seeded_noise": True,
                "policy": dict(REHEARSAL),
                "approval": "policy",
                **more,
            }
        )
    return settings


def answering(configs: Mapping[str, SiloSettings]) -> dict[int, Callable[[bytes], bytes]]:
    """Map each node to the function that answers for its silo; sessions live as long as the dictionary."""
    return {node: Session(local).answer for node, local in enumerate(configs.values())}


def job(config: Config, out: Path, silos: Collection[str], local: bool = True) -> CoordinatorJob:
    """Return the coordinator's job; FedFAME's labeled rows are drawn as in one process."""
    folder = out / "federation"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    labeled = None
    if config.server.labels_per_class:
        labeled = str(folder / "labeled")
        write_rows(folder / "labeled", draw_labeled_rows(load_silos(config), config.server, config.data_seed))
    return CoordinatorJob(str(folder / "config.yaml"), str(out), tuple(sorted(silos)), labeled, local)


def coordinated(config: Config, out: Path, configs: Mapping[str, SiloSettings], local: bool = True) -> DirectLink:
    """Run a federation over sessions of these silos; returns the link with all messages."""
    link = DirectLink(answering(configs))
    coordinate(job(config, out, configs, local), link)
    return link


def federate(config: Config, out: Path, order: Sequence[int] = (0, 1, 2), **more: object) -> tuple[dict, DirectLink]:
    """Run a federation over sessions of silos with `more` settings; returns its summary and the link."""
    configs = local_configs(config, out, **more)
    answers = answering(configs)
    link = DirectLink({node: answers[node] for node in order})
    coordinate(job(config, out, configs), link)
    return read_summary(out), link
