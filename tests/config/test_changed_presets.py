"""Every value of every preset, changed by itself, fails a test that holds presets to their papers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml

from silotune.config import preset_names, presets
from tests.config import test_preset_table as values
from tests.lab import test_comparison_presets as comparisons

UNTESTED = ("description",)
"""Top keys that only people read."""


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values that are no mapping and no list, and of empty ones."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in entries:
        if isinstance(value, (dict, list)) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def changed(value: Any) -> Any:
    """Return another value of the same kind; YAML reads `1e-3` as text."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 or 0.25
    if isinstance(value, str):
        return repr(float(value) * 2) if value.replace("e-", "").replace("e", "").isdigit() else f"{value}x"
    return {"seed": 7} if isinstance(value, dict) else "x"


def hold(preset: str) -> None:
    """Run the tests that hold this preset's values."""
    values.test_values_are_those_of_the_paper(preset)
    values.test_values_that_a_method_brings_along_are_the_papers_for_other_methods_too(preset)
    comparisons.test_presets_of_the_papers_name_their_backbones()
    comparisons.test_feddpas_backbone_is_in_eight_bits_where_a_gpu_is()
    if preset in comparisons.COMPARED:
        comparisons.test_a_comparison_is_the_papers(preset)
    if preset in comparisons.DATA:
        comparisons.test_tasks_are_the_papers(preset)
    if (task := preset.removeprefix("fedprompt-")) in comparisons.WORDS:
        comparisons.test_label_words(task)
    if preset.startswith("table45"):
        comparisons.test_small_tables_4_and_5(preset)
    for name, *fractions in comparisons.FRACTIONS:
        if name == preset:
            comparisons.test_client_fractions(name, *fractions)


@pytest.mark.long
@pytest.mark.parametrize("preset", preset_names())
def test_a_changed_value_is_noticed(preset, monkeypatch):
    text_of, texts = presets.preset_text, {}
    monkeypatch.setattr(presets, "preset_text", lambda name: texts.get(name) or text_of(name))
    hold(preset)
    tree, unnoticed = yaml.safe_load(text_of(preset)), []
    for *path, last in leaves(tree):
        if (*path, last)[0] in UNTESTED:
            continue
        found = deepcopy(tree)
        inner = found
        for key in path:
            inner = inner[key]
        inner[last] = changed(inner[last])
        texts[preset] = yaml.safe_dump(found, sort_keys=False)
        try:
            hold(preset)
        except Exception:  # not equal, or refused before it was compared
            continue
        unnoticed.append((*path, last))
    assert not unnoticed
