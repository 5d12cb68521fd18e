"""Lets a SuperNode answer the greeting, and then announce every reply without uploading it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from silotune.distributed.protocol.frames import MAGIC

HELLO = b'"kind": "hello"'
"""In the header of a reply to a greeting."""

SITE = """import sys
if any(word.endswith("flower-supernode") for word in sys.orig_argv):
    from tests.support.silent_supernode import install
    install()
"""


def install() -> None:
    """Replace the upload of replies in this process; greetings are answered as they should be, however often."""
    from flwr.supernode import start_client_internal as internal

    upload = internal.push_object_contents_from_iterable

    def hellos_only(contents: Iterable[tuple[str, bytes]], push_object_fn: Callable[..., Any], **options: Any) -> None:
        objects = list(contents)
        if all(HELLO in content for _, content in objects if MAGIC in content):
            upload(objects, push_object_fn, **options)

    internal.push_object_contents_from_iterable = hellos_only


def python_path(folder: Path) -> str:
    """Write a `sitecustomize` module into a folder, and return the PYTHONPATH under which SuperNodes are silent."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    root = Path(__file__).parents[2]
    return ":".join([str(folder), str(root), *sys.path[1:]])
