"""Files with modes and owners, system users and systemd units, for `federation init` and `silo join`."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from silotune.errors import InputError, SilotuneError

TEMPLATES = Path(__file__).parent / "templates"
"""nginx.conf, compose.yaml and systemd units, with the paths and names of docs/deployment.md."""

UNITS = Path("/etc/systemd/system")

GROUP = "silotune"
"""The group of all of silotune's users."""


def require_absent(paths: Iterable[Path], remedy: str) -> None:
    """Refuse to overwrite."""
    for path in paths:
        if path.exists() or path.is_symlink():
            raise InputError(f"{path}: is already there, and nothing is overwritten; {remedy}")


def write_new(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write a file that must not exist, with its mode from the first byte on."""
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError as error:
        raise InputError(f"{path}: is already there, and nothing is overwritten") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)


def replace(path: Path, content: bytes, mode: int) -> None:
    """Replace a file, with its mode from the first byte on, and keep the old one as `NAME.old` with its owner."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    write_new(fresh, content, mode)
    if path.exists() and path.read_bytes() != content:
        like(path, fresh)
        old = path.with_name(f"{path.name}.old")
        old.unlink(missing_ok=True)
        os.link(path, old)
    fresh.replace(path)


def like(owner: Path, path: Path) -> None:
    """Give a file the owner of another, where this process may: root writes into a folder of another user."""
    if os.geteuid() == 0:
        status = owner.stat()
        os.chown(path, status.st_uid, status.st_gid)


def filled(template: str, replacements: dict[str, str]) -> str:
    """Return a template with its example values replaced."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    for old, new in replacements.items():
        if old not in text:
            raise AssertionError(f"{template}: lacks {old!r}")
        text = text.replace(old, new)
    return text


def program() -> str:
    """Return the path of the `silotune` that runs, for units and for the commands that are shown."""
    beside = Path(sys.executable).parent / "silotune"
    return str(beside) if beside.exists() else shutil.which("silotune") or "silotune"


def require_root() -> None:
    """Refuse `--install`, which makes users and units."""
    if os.geteuid() != 0:
        raise InputError("--install: makes users and units, so it needs root (sudo); without it, files alone are made")


def make_user(name: str) -> None:
    """Make a system's user in `GROUP`, if it is not there.

    Raises:
        SilotuneError: useradd refused.
    """
    try:
        grp.getgrnam(GROUP)
    except KeyError:
        _system("groupadd", "--system", GROUP)
    try:
        pwd.getpwnam(name)
    except KeyError:
        words = ("--system", "--gid", GROUP, "--no-create-home", "--home-dir", "/nonexistent")
        _system("useradd", *words, "--shell", "/usr/sbin/nologin", name)


def own(path: Path, user: str) -> None:
    """Give a file or folder to a user and to `GROUP`."""
    os.chown(path, pwd.getpwnam(user).pw_uid, grp.getgrnam(GROUP).gr_gid)


def state_folder(path: Path, user: str) -> None:
    """Make a folder that its user alone can read."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    own(path, user)


def may_read(user: str, path: Path) -> bool:
    """Return whether a user may read a file, or the files of a folder."""
    words = ["runuser", "-u", user, "--", "test", "-r", str(path)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def install_units(texts: dict[str, str]) -> bool:
    """Write systemd units and start them; returns whether systemd runs here, so that they were started.

    Raises:
        SilotuneError: systemctl refused.
    """
    require_absent((UNITS / name for name in texts), "remove it, or leave out --install")
    for name, text in texts.items():
        write_new(UNITS / name, text)
    if not Path("/run/systemd/system").is_dir():
        return False
    _system("systemctl", "daemon-reload")
    _system("systemctl", "enable", "--now", *texts)
    return True


def _system(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise SilotuneError(f"{' '.join(words)}: {' '.join(str(reason).split())}") from error
