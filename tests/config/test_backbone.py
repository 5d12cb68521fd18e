"""The section `backbone`: its short form, in words and in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune.config import BackboneConfig, Config, dump
from silotune.config.parse import validated
from silotune.config.trees import parse_tree
from silotune.errors import InputError
from silotune.runs.build.resolve import read_config


def test_a_name_alone_is_written_as_it_always_was():
    text = dump(read_config("demo", ["backbone=org/model"]))
    assert "\nbackbone: org/model\n" in text
    assert validated(parse_tree(text, "file")).backbone == BackboneConfig(name="org/model")


def test_other_keys_are_written_and_read():
    config = read_config("demo", ["backbone=org/model", "backbone.revision=v2", "backbone.attention=sdpa"])
    assert config.backbone == BackboneConfig(name="org/model", revision="v2", attention="sdpa")
    text = dump(config)
    assert validated(parse_tree(text, "file")).backbone == config.backbone
    assert dump(validated(parse_tree(text, "file"))) == text


def test_another_backbone_keeps_the_attention_and_not_the_revision(tmp_path: Path):
    path = tmp_path / "file.yaml"
    path.write_text("preset: demo\nbackbone:\n  name: org/model\n  revision: v2\n  attention: sdpa\n", encoding="utf-8")
    assert read_config(str(path)).backbone.revision == "v2"
    other = read_config(str(path), ["backbone=org/other"]).backbone
    assert other == BackboneConfig(name="org/other", attention="sdpa")


def test_a_configuration_in_python_takes_the_name_as_well():
    tree = read_config("demo").model_dump() | {"backbone": "org/model"}
    assert Config.model_validate(tree).backbone.name == "org/model"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["backbone.attention=paged"], r"backbone\.attention: .*'eager', 'sdpa' or 'flash'"),
        (["backbone.revison=v2"], r"backbone\.revison.*backbone\.revision"),
    ],
)
def test_bad_values_are_refused(words, message):
    with pytest.raises(InputError, match=message):
        read_config("demo", words)
