"""Lets a SuperNode answer the greeting, and then announce every reply without uploading it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SITE = """import sys
if any(word.endswith("flower-supernode") for word in sys.orig_argv):
    from tests.support.silent_supernode import install
    install()
"""


def install() -> None:
    """Replace the upload of replies in this process; the first reply is uploaded as it should be."""
    from flwr.supernode import start_client_internal as internal

    upload, uploads = internal.push_object_contents_from_iterable, 0

    def first_only(contents: Iterable[tuple[str, bytes]], push_object_fn: Callable[..., Any], **options: Any) -> None:
        nonlocal uploads
        uploads += 1
        if uploads == 1:
            upload(contents, push_object_fn, **options)

    internal.push_object_contents_from_iterable = first_only


def python_path(folder: Path) -> str:
    """Write a `sitecustomize` module into a folder, and return the PYTHONPATH under which SuperNodes are silent."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    root = Path(__file__).parents[2]
    return ":".join([str(folder), str(root), *sys.path[1:]])
