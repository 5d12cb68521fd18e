"""Fixtures that run cases: tiny silos with unequal rows, one loaded backbone, one finished run of each case."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import BertModel

from silotune.runs.run_result import Run
from tests.support.method_cases import Federate, Wire, write_silos

Reference = Callable[[str], tuple[Run, Wire]]


@pytest.fixture(scope="session")
def silos_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that `method_cases.write_silos` has written."""
    return write_silos(tmp_path_factory.mktemp("silos"))


@pytest.fixture(scope="session")
def small_backbone(backbone_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a one-block BERT, for tests that do not depend on depth."""
    folder = shutil.copytree(backbone_folder("bert"), tmp_path_factory.mktemp("backbone") / "small")
    model = BertModel.from_pretrained(folder)
    model.encoder.layer = model.encoder.layer[:1]
    model.config.num_hidden_layers = 1
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def federate(silos_folder: Path, small_backbone: Path) -> Federate:
    """Runner of cases; see `method_cases.Federate`."""
    return Federate(silos_folder, small_backbone)


@pytest.fixture(scope="session")
def reference(federate: Federate, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """`reference(case)` → a finished run of seed 1 and the messages that passed in it."""
    root = tmp_path_factory.mktemp("references")
    return lambda case: federate.reference(case, root)
