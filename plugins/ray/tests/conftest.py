"""Fixtures of silotune's own tests, and the plug-in as an installed package."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.plugin.conftest import install
from tests.support.federate import federate, reference, silos_folder, small_backbone
from tests.support.fixtures import _one_thread, _own_cache, backbone_folder, data_folder, tiny_config

__all__ = ["_one_thread", "_own_cache", "backbone_folder", "data_folder", "federate", "reference", "silos_folder"]
__all__ += ["small_backbone", "tiny_config"]

PACKAGE = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory):
    """Its metadata, on the path of this process, unless pip has installed it."""
    with pytest.MonkeyPatch.context() as patch:
        if not entry_points(group="silotune.engines"):
            site = tmp_path_factory.mktemp("site")
            project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            install(site, project["entry-points"], project["name"])
            patch.syspath_prepend(site)
        yield
