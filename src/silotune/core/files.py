"""Read, replace and lock files, and read YAML; a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, cast

import yaml

from silotune.errors import InputError, file_errors


def make_folder(path: Path, culprit: str) -> None:
    """Make a folder that a user asked for, with its parents; an existing one is kept."""
    with file_errors(f"{culprit}: cannot be made"):
        path.mkdir(parents=True, exist_ok=True)


def read_bytes(path: Path) -> bytes:
    """Read a regular file, and refuse a pipe or device, for folders that come from someone else.

    Raises:
        OSError: the file cannot be read, or is not a regular file, so that reading it might never end.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, which need not fit into memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def decode_text(content: bytes, encoding: str = "utf-8") -> str:
    """Decode text without its byte-order mark; where that is UTF-16's (of Windows' editors), as UTF-16.

    Raises:
        UnicodeDecodeError: the content is not text of the encoding.
    """
    marked = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return content.decode("utf-16" if marked else encoding).removeprefix("\ufeff")


def text_lines(file: BinaryIO, newline: str = "", encoding: str = "utf-8") -> TextIOWrapper:
    """Return the text of a file that is read piece by piece, decoded as `decode_text` does; iterating raises its error.

    Args:
        file: it can be peeked into.
        newline: as of `open`; empty: lines end as they do in the file, at any line end.
        encoding: of text without a byte-order mark of UTF-16.
    """
    if cast(BufferedReader, file).peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encoding = "utf-16"
    codec = codecs.lookup(encoding).name
    return TextIOWrapper(cast(BufferedReader, file), "utf-8-sig" if codec == "utf-8" else encoding, newline=newline)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object as `read_bytes` reads files.

    Raises:
        OSError: as `read_bytes`.
        ValueError: the content is no JSON object in UTF-8, or is nested too deeply.
    """
    try:
        content = json.loads(decode_text(read_bytes(path)))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def free_bytes(folder: Path) -> int | None:
    """Return the free space where a folder is, in bytes; None if it cannot be asked for."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file that only one process writes at a time; a leftover of a killed writer is overwritten.

    Raises:
        OSError: the file cannot be written; its old content stays.
    """
    _replace(path, content, "tmp")


def write_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text; several processes may do so at the same time.

    Raises:
        OSError: the file cannot be written; its old content stays.
    """
    _replace(path, text.encode(), str(os.getpid()))


def _replace(path: Path, content: bytes, suffix: str) -> None:
    temporary = path.with_name(f".{path.name}.{suffix}")
    try:
        temporary.write_bytes(content)
    except OSError as error:
        if error.filename is None:  # of a full disk, which is found while writing
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    temporary.replace(path)


_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError)
"""What reading a file raises that is not as it was written."""


@contextmanager
def damage_named(culprit: object, remedy: str = "") -> Iterator[None]:
    """Say in one line that a file which silotune wrote (`culprit`) is missing, or no longer as it was written."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, *_DAMAGE, SafetensorError) as error:
        raise InputError(f"{culprit}: missing or damaged ({' '.join(str(error).split())[:300]}){remedy}") from error


LOCK_FILE = ".lock"
"""Name of the lock file; it exists while the folder is locked."""


@contextmanager
def folder_lock(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder for this process. The operating system releases the lock when the process ends.

    A missing folder is made. `patience` are the seconds to wait for another process to release the lock.
    """
    from filelock import FileLock, Timeout  # a quarter of a second, which most commands do not need

    make_folder(path, f"--out {path}")
    lock = FileLock(path / LOCK_FILE)
    with file_errors(f"--out {path}: cannot be locked"):
        try:
            lock.acquire(timeout=patience, poll_interval=0.1)
        except Timeout:
            raise InputError(f"{path}: another process is at work there; wait for it, or end it") from None
    try:
        yield
    finally:
        with suppress(PermissionError):  # Windows removes no open file; there the release removes it
            (path / LOCK_FILE).unlink(missing_ok=True)  # before the release: the next process makes a new one
        lock.release()


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a folder; True if the system cannot tell."""
    from filelock import FileLock, Timeout

    file = path / LOCK_FILE
    if not file.exists():
        return False
    try:
        with FileLock(file, timeout=0):
            return False
    except (Timeout, OSError):
        return True


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_LOADER):  # type: ignore[misc]
    """A safe loader that refuses a key given twice; YAML itself would keep its last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} appears twice", key.start_mark)
            keys.add(str(key.value))
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        yaml.YAMLError: it is no YAML, or has a key twice.
        ValueError: a value cannot be, such as the 99th of a month.
    """
    return yaml.load(text, _Loader)


def dump_yaml(tree: Any) -> str:
    """Return a value as YAML, mappings in their order."""
    return str(yaml.dump(tree, Dumper=_DUMPER, sort_keys=False, allow_unicode=True))
