"""Writes keys and settings without overwriting, fills in the templates, and installs the units that they make."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from silotune.core.surroundings import require_posix
from silotune.errors import InputError, SilotuneError, file_errors

TEMPLATES = Path(__file__).parent / "templates"
"""nginx.conf, compose.yaml and systemd units, with the paths and names of docs/deployment.md."""

UNITS = Path("/etc/systemd/system")


def require_absent(paths: Iterable[Path], remedy: str) -> None:
    """Refuse to overwrite."""
    for path in paths:
        if path.exists() or path.is_symlink():
            raise InputError(f"{path}: is already there, and nothing is overwritten; {remedy}")


def write_new(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write a file that must not exist, with its mode from the first byte on."""
    data = content.encode() if isinstance(content, str) else content
    with file_errors(f"{path}: cannot be written, and nothing is overwritten"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def replace_content(path: Path, content: bytes) -> None:
    """Give a file other content and keep the old as `NAME.old`; the file keeps its owner and mode."""
    if path.read_bytes() != content:
        old = path.with_name(f"{path.name}.old")
        old.unlink(missing_ok=True)
        write_new(old, path.read_bytes(), path.stat().st_mode & 0o777)
        path.write_bytes(content)


def filled(template: str, replacements: Mapping[str, str]) -> str:
    """Return a template with its example values replaced."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    for old, new in replacements.items():
        if old not in text:
            raise AssertionError(f"{template}: lacks {old!r}")
        text = text.replace(old, new)
    return text


def program() -> str:
    """Return the path of the `silotune` that runs, for units."""
    beside = Path(sys.executable).parent / "silotune"
    return str(beside) if beside.exists() else shutil.which("silotune") or "silotune"


def require_root() -> None:
    """Refuse `--install` for other users: it makes users and units."""
    require_posix("--install")
    if os.geteuid() != 0:
        raise InputError("--install: makes users and units, so it needs root (sudo); without it, files alone are made")


def install(folder: Path) -> bool:
    """Let systemd make the users and modes that a party's files ask for; return whether it started the units."""
    units = sorted(folder.glob("*.service"))
    _run("systemd-sysusers", str(folder / "sysusers.conf"))
    _run("systemd-tmpfiles", "--create", str(folder / "tmpfiles.conf"))
    for unit in units:
        shutil.copyfile(unit, UNITS / unit.name)
    if not Path("/run/systemd/system").is_dir():
        return False
    _run("systemctl", "daemon-reload")
    _run("systemctl", "enable", "--now", *(unit.name for unit in units))
    return True


def reload_proxy() -> bool:
    """Let an installed nginx read its files again; returns whether systemd has done so."""
    unit = "silotune-proxy.service"
    installed = (UNITS / unit).exists() and Path("/run/systemd/system").is_dir()
    if installed:
        _run("systemctl", "try-reload-or-restart", unit)
    return installed


def _run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise SilotuneError(f"{' '.join(words)}: {' '.join(str(reason).split())}") from error
