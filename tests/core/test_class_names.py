"""No class name stands for two things, so that a reader who finds it knows which is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import silotune

GENERATED = "config/keys.py"


def test_every_class_name_is_of_one_file() -> None:
    root, files = Path(silotune.__file__).parent, defaultdict[str, set[str]](set)
    for path in root.rglob("*.py"):
        file = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and file != GENERATED:
                files[node.name.removeprefix("_")].add(file)
    assert len(files) > 400
    assert {name: places for name, places in files.items() if len(places) > 1} == {}
