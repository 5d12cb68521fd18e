"""YAML by libyaml and by PyYAML's own parser: the same values, the same refusals."""

from __future__ import annotations

import pytest
import yaml

from silotune.config import preset_names, preset_text
from silotune.core import yaml_text
from silotune.core.yaml_text import dump_yaml, load_yaml

LIMIT = yaml_text._LONGEST_FOR_LIBYAML


def by_python(text: str) -> object:
    """The value that PyYAML's own parser reads: behind a comment, the text is too long for libyaml."""
    return load_yaml(f"#{' ' * LIMIT}\n{text}")


def test_all_presets_have_the_same_values_and_survive_a_round() -> None:
    for name in preset_names():
        text = preset_text(name)
        tree = load_yaml(text)
        assert tree == by_python(text) == load_yaml(dump_yaml(tree))
        assert [*tree] == [*load_yaml(dump_yaml(tree))], "in the same order"


@pytest.mark.parametrize(
    "text",
    ["1e-3", "[a, 'b', 2.5, null, yes]", "x: {y: [1, {z: é}]}", "a: &a {b: 1}\nc: *a", "2026-01-31", "", "😀: ü"],
)
def test_values(text: str) -> None:
    assert load_yaml(text) == by_python(text)


@pytest.mark.parametrize(
    "text", ["a: [1", "a: 1\na: 2", "{b: 1, b: 2}", "2026-02-31", "&a [*a]", "!!python/name:os.system", "@", "\x07"]
)
def test_refusals(text: str) -> None:
    for read in (load_yaml, by_python):
        with pytest.raises((yaml.YAMLError, ValueError, RecursionError)):
            read(text)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
@pytest.mark.parametrize("length", [LIMIT, 20 * LIMIT])
def test_what_is_nested_too_deeply_is_refused_and_ends_no_process(opening: str, length: int) -> None:
    """The deepest text that libyaml gets, and one that would exhaust its stack."""
    with pytest.raises((yaml.YAMLError, RecursionError)):
        load_yaml(opening * (length // len(opening)))
