"""YAML is read as PyYAML reads it, but for keys given twice."""

from __future__ import annotations

import pytest
import yaml

from silotune.config import preset_names, preset_text
from silotune.core.files import dump_yaml, load_yaml


def test_all_presets_survive_a_round_in_their_order() -> None:
    for name in preset_names():
        tree = load_yaml(preset_text(name))
        again = load_yaml(dump_yaml(tree))
        assert (tree, [*tree]) == (again, [*again])


@pytest.mark.parametrize(
    "text",
    ["1e-3", "[a, 'b', 2.5, null, yes]", "x: {y: [1, {z: é}]}", "a: &a {b: 1}\nc: *a", "2026-01-31", "", "😀: ü"],
)
def test_values(text: str) -> None:
    assert load_yaml(text) == yaml.safe_load(text)
