"""Fixtures of all suites: tiny backbones, tiny data, and federations over them. No network, one thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from silotune.config import Config
from silotune.core import records
from silotune.models.backbone import loading
from silotune.models.backbone.backbone import Backbone
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.federation import Federation
from tests.support.chats import chat_model
from tests.support.command_line import command, place, refused
from tests.support.federate import federate, reference, silos_folder, small_backbone
from tests.support.language_models import folder_of
from tests.support.report_runs import no_figure_files, no_figures
from tests.support.small_runs import runs
from tests.support.tiny import ReadOnce, save_backbone, tiny_overrides, write_data

__all__ = ["command", "federate", "no_figure_files", "no_figures", "place", "reference", "refused", "runs"]
__all__ += ["silos_folder", "small_backbone"]

torch.set_num_threads(1)

BackboneFolder = Callable[[str], Path]
TinyConfig = Callable[..., Config]
TinyFederation = Callable[..., Federation]


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Digests of weights are kept here, not in the user's cache; processes that tests start inherit it."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="session")
def _models_are_read_once() -> Iterator[None]:
    """A model of files that were read before is a copy of what was read: reading one takes longer than most tests.

    Quantized and spread models are read, and all models of tests/models/backbone.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_read", ReadOnce(loading._read))
        yield


@pytest.fixture(autouse=True, scope="session")
def _records_do_not_wait_for_the_disk() -> Iterator[None]:
    """A transaction waits for longer than most tests take; a killed process loses nothing without, a machine might."""
    assert records.SYNCHRONOUS == "FULL"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "SYNCHRONOUS", "OFF")
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """A test that changed the process's settings must not change those of the next one.

    Workers and coordinators are processes of their own, and set threads and determinism for good.
    """
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("default")
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        os.environ.pop(variable, None)


@pytest.fixture(scope="session")
def backbone_folder(tmp_path_factory: pytest.TempPathFactory) -> BackboneFolder:
    """`backbone_folder("bert")` → the folder of a tiny backbone of that family (see `tiny.FAMILIES`)."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_backbone(family, tmp_path_factory.mktemp(f"backbone-{family}"))
        return made[family]

    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> BackboneFolder:
    """`model_folder("llama")` → the folder of a tiny language model of `language_models`, or of `chat`. Read only."""
    parent = tmp_path_factory.mktemp("language-models")
    return lambda family: chat_model(parent) if family == "chat" else folder_of(family, parent)


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tasks alpha, beta and gamma in the layout of `data.path`. Read only: copy it before changing it."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def tiny_config(backbone_folder: BackboneFolder, data_folder: Path) -> TinyConfig:
    """`tiny_config("fedmcp", "rounds=1", …)` → a resolved configuration over the tiny data and the BERT backbone."""

    def make(method: str, *overrides: str) -> Config:
        return read_config("demo", [*tiny_overrides(method, backbone_folder("bert"), data_folder), *overrides])

    return make


@pytest.fixture(scope="session")
def tiny_federation(tiny_config: TinyConfig) -> TinyFederation:
    """`tiny_federation("fedmcp", "seed=2", …)` → a fresh federation; `backbone=` takes one already loaded."""

    def make(method: str, *overrides: str, backbone: Backbone | None = None) -> Federation:
        return build(tiny_config(method, *overrides), backbone)

    return make
