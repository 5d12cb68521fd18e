"""The example package, on the path as an installer leaves it, and registries that forget it afterwards."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from silotune.config import registries
from silotune.config.registries import Registry

PACKAGE = Path(__file__).parent / "package"

REGISTRIES = [value for value in vars(registries).values() if isinstance(value, Registry)]


def install(folder: Path, entry_points: dict[str, dict[str, str]], name: str = "silotune-example") -> None:
    """Metadata of an installed package: {group: {name: value}}."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{entry} = {value}\n" for entry, value in entries.items())
        for group, entries in entry_points.items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture
def fresh_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries of a new process; what is registered in a test ends with it."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))
        monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.delitem(sys.modules, "silotune_example", raising=False)


@pytest.fixture
def site(fresh_registries: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of installed packages, on the path of this process and of those it starts."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return folder


@pytest.fixture
def installed(site: Path) -> Path:
    """The example package, installed."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copy(PACKAGE / "silotune_example.py", site)
    install(site, project["entry-points"])
    return site
