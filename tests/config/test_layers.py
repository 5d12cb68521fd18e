"""Which value wins: command line over file over `per_method` over the method's defaults over the preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from silotune import InputError, read_config
from silotune.config import BackboneConfig, Config, dump, load_config
from silotune.config.paths import read_tree
from silotune.config.trees import parse_word
from silotune.lab.comparison import read_comparison
from silotune.methods.local import Local
from tests.support.tiny import METHODS


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(*words: str, **keys: Any) -> Config:
    """A file with these keys over the preset `demo`, and words on the command line."""
    Path("file.yaml").write_text(yaml.safe_dump({"preset": "demo", **keys}), encoding="utf-8")
    return read_config("file.yaml", list(words))


class TestKeys:
    def test_the_short_form(self) -> None:
        short = read_config("demo", ["method=fedavg", "tuner=lora", "head=linear", "aggregation=samples"])
        words = ["method.name=fedavg", "tuner.name=lora", "head.name=linear", "aggregation.name=samples"]
        assert short == read_config("demo", words)
        assert (short.method.name, short.tuner.name, short.head.name) == ("fedavg", "lora", "linear")
        assert short.aggregation.name == "samples"

    def test_precision_is_a_name_or_a_section(self) -> None:
        short = read_config("demo", ["precision=bf16"])
        assert short == read_config("demo", ["precision.name=bf16"]) == config(precision={"name": "bf16"})
        assert short.precision.deterministic
        assert "\nprecision: bf16\n" in dump(short)  # as files before the section had it
        loose = config("precision=bf16", precision={"name": "fp32", "deterministic": False})
        assert (loose.precision.name, loose.precision.deterministic) == ("bf16", False)
        Path("dumped.yaml").write_text(dump(loose), encoding="utf-8")
        assert read_config("dumped.yaml").precision == loose.precision

    def test_a_backbone_is_a_name_or_a_section(self) -> None:
        short = read_config("demo", ["backbone=org/model"])
        assert "\nbackbone: org/model\n" in dump(short)
        assert Config.model_validate(read_config("demo").model_dump() | {"backbone": "org/model"}) == short
        whole = read_config("demo", ["backbone=org/model", "backbone.revision=v2", "backbone.attention=sdpa"])
        assert whole.backbone == BackboneConfig(name="org/model", revision="v2", attention="sdpa")
        Path("dumped.yaml").write_text(dump(whole), encoding="utf-8")
        assert read_config("dumped.yaml").backbone == whole.backbone

    def test_dotted_nested_and_mixed_keys_are_one(self) -> None:
        nested = config(method={"name": "fedmcp", "gamma": 0.3}, train={"lr": 0.01, "epochs": 2})
        dotted = config(**{"method": "fedmcp", "method.gamma": 0.3, "train.lr": 0.01, "train.epochs": 2})
        words = config("method.gamma=0.3", "train.lr=0.01", "train.epochs=2")
        assert nested == dotted == words
        assert (words.method.options["gamma"], words.train.lr, words.train.epochs) == (0.3, 0.01, 2)

    def test_values_on_the_command_line_are_yaml_lists_may_be_bare_and_the_last_of_two_wins(self) -> None:
        words = ["train.lr=1e-4", "data.tasks=[sentiment, inference]", "data.merge=false", "train.steps=5"]
        found = read_config("demo", [*words, "train.steps=", "tuner=lora", "tuner.sites=query,key"])
        assert (found.train.lr, found.data.tasks, found.data.merge) == (1e-4, ["sentiment", "inference"], False)
        assert (found.train.steps, found.tuner.options["sites"]) == (None, ["query", "key"])
        assert read_config("demo", ["data.tasks=sentiment,inference"]).data.tasks == found.data.tasks

    @pytest.mark.parametrize(
        ("word", "template"),
        [
            ("### Question: {instruction} ### Answer:", "### Question: {instruction} ### Answer:"),
            ("Q: {instruction}\nA: ", "Q: {instruction}\nA: "),
            ("{instruction}", "{instruction}"),
            ('"{text} is {mask}."', "{text} is {mask}."),
            ("{text} is {mask}.", "{text} is {mask}."),
            ("{sst2: '{text} is {mask}.'}", {"sst2": "{text} is {mask}."}),
            ("", None),
        ],
    )
    def test_a_template_is_text_as_it_stands(self, word: str, template: object) -> None:
        assert parse_word(f"head.template={word}") == ("head.template", template)

    def test_a_number_sign_begins_no_comment(self) -> None:
        assert parse_word("description=run # 3") == ("description", "run # 3")
        assert parse_word("data.tasks=[a, b]  # both") == ("data.tasks", ["a", "b"])

    def test_an_empty_section_in_a_file_says_nothing(self) -> None:
        assert config(train=None, head=None) == config()


class TestLayers:
    """`rounds` is set in one layer more from test to test; the demo says 6 or so, and has two adapters for FedProx."""

    def test_the_preset_over_the_schema_and_the_method_over_the_preset(self) -> None:
        plain, full = config(), config("method=fedavg-full")
        assert (plain.head.pooling, Config.model_fields["head"].default.pooling) == ("mean", "auto")
        assert (plain.tuner.name, full.tuner.name, full.tuner.options) == ("bottleneck", "full", {})

    def test_per_method_of_the_preset_over_the_method(self) -> None:
        assert config("method=fedprox").method.options["adapters"] == 2
        assert config("method=fedavg-full").method.options["adapters"] == 1

    def test_each_of_the_two_over_the_layer_below(self, monkeypatch) -> None:
        """A method that would bring one adapter and nine rounds along: the demo gives it two, and says 6 or so."""
        assert load_config("demo", ["method=local"]).rounds not in (2, 9)
        monkeypatch.setattr(Local, "defaults", {"method.adapters": 1, "rounds": 9})
        found = load_config("demo", ["method=local"])
        assert (found.method.options["adapters"], found.rounds) == (2, 9)

    def test_the_file_over_per_method_of_the_preset(self) -> None:
        assert config(method={"name": "fedprox", "adapters": 1}).method.options["adapters"] == 1
        assert config(method="fedavg-full", tuner={"name": "lora", "r": 2}).tuner.options["r"] == 2

    def test_per_method_of_the_file_over_the_file(self) -> None:
        per_method = {"fedprox": {"rounds": 4, "method": {"mu": 0.7}, "train.lr": 0.5}, "fedavg": {"rounds": 2}}
        found = config("method=fedprox", rounds=5, per_method=per_method)
        assert (found.rounds, found.method.options["mu"], found.train.lr) == (4, 0.7, 0.5)
        assert found.method.options["adapters"] == 2  # the preset's entry stays beside the file's
        assert config("method=fedavg", rounds=5, per_method=per_method).rounds == 2
        assert config("method=local", rounds=5, per_method=per_method).rounds == 5

    def test_the_command_line_over_all(self) -> None:
        per_method = {"fedprox": {"rounds": 4, "method.mu": 0.7}}
        words = ("method=fedprox", "rounds=3", "method.mu=0.1", "method.adapters=1")
        found = config(*words, rounds=5, per_method=per_method)
        assert (found.rounds, found.method.options["mu"], found.method.options["adapters"]) == (3, 0.1, 1)

    def test_per_method_on_the_command_line_over_its_other_words(self) -> None:
        """Whichever comes first: what is said of one method is not undone by what is said of all."""
        words = ["method=fedprox", "per_method.fedprox.rounds=2", "rounds=7"]
        assert read_config("demo", words).rounds == read_config("demo", words[::-1]).rounds == 2
        assert read_config("demo", ["method=local", *words[1:]]).rounds == 7

    def test_changes_over_all(self) -> None:
        words = ["method=fedprox", "rounds=7", "per_method.fedprox.rounds=2"]
        assert read_config("demo", words, ["rounds=3"]).rounds == 3


USUAL = {"head_rounds": 0, "head_lr": None}
"""Options that every method has."""


class TestAnotherName:
    """Options belong to the name they were given with."""

    def test_options_of_another_method_are_dropped(self) -> None:
        """Also of a name in the preset; and the preset's entry for FedProx must survive the file's FedAvg."""
        for method in ({"name": "fedmcp", "gamma": 0.3}, {"name": "fedavg", "adapters": 1}):
            assert config("method=fedprox", method=method).method.options == USUAL | {"adapters": 2, "mu": 0.01}
        assert config("method=fedavg", **{"method.gamma": 0.3}).method.options == USUAL | {"adapters": 2}

    def test_options_of_another_tuner_are_dropped_and_stay_where_the_name_is_only_repeated(self) -> None:
        found = config("tuner=lora", tuner={"r": 3})
        assert (found.tuner.options["r"], found.tuner.options["sites"]) == (8, ["query", "value"])
        assert config("tuner=bottleneck", tuner={"r": 3}).tuner.options["r"] == 3

    def test_the_head_s_scope_and_pooling_outlive_its_kind(self) -> None:
        found = config("head=linear", **{"head.scope": "shared"})
        assert (found.head.name, found.head.scope, found.head.pooling) == ("linear", "shared", "mean")

    def test_the_attention_outlives_the_backbone_and_its_revision_does_not(self) -> None:
        found = config("backbone=org/other", backbone={"name": "org/model", "revision": "v2", "attention": "sdpa"})
        assert found.backbone == BackboneConfig(name="org/other", attention="sdpa")

    def test_options_alone_are_of_the_default_name(self) -> None:
        Path("bare.yaml").write_text("data: {set: demo}\nmethod.gamma: 0.2\ntuner.r: 5\n", encoding="utf-8")
        found = read_config("bare.yaml")
        assert (found.method.name, found.method.options["gamma"]) == ("fedmcp", 0.2)
        assert (found.tuner.name, found.tuner.options["r"]) == ("bottleneck", 5)


class TestPaths:
    def test_relative_to_the_file_or_to_where_the_command_is_given(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        text = "data: {path: rows}\n"
        (tmp_path / "sub" / "file.yaml").write_text(text, encoding="utf-8")
        assert read_config("sub/file.yaml").data.path == str(tmp_path / "sub" / "rows")
        assert read_config("sub/file.yaml", ["data.path=rows"]).data.path == str(tmp_path / "rows")
        assert read_config("demo", ["data.path=../rows"]).data.path == str(tmp_path.parent / "rows")
        assert read_config("demo", [f"data.path={tmp_path}"]).data.path == str(tmp_path)

    def test_a_backbone_is_a_path_only_where_there_is_one(self, tmp_path: Path) -> None:
        (tmp_path / "org" / "model").mkdir(parents=True)
        assert read_config("demo", ["backbone=org/model"]).backbone.name == str(tmp_path / "org" / "model")
        assert read_config("demo", ["backbone=org/other"]).backbone.name == "org/other"
        (tmp_path / "default").mkdir()
        assert read_config("demo", ["backbone=default"]).backbone.name == "default"

    @pytest.mark.parametrize(
        "keys", [{"start": "./lora", "privacy.secret": "s"}, {"start": "lora", "privacy": {"secret": "./s"}}]
    )
    def test_of_methods_entries_and_of_variants_as_well(self, tmp_path: Path, keys: dict[str, Any]) -> None:
        (tmp_path / "sub" / "own").mkdir(parents=True)
        keys = keys | {"backbone": "own", "data.path": "../rows"}
        tree = {"per_method": {"fedavg": keys}, "compare": {"variants": {"other": keys}}}
        (tmp_path / "sub" / "file.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        read = read_tree(Path("sub/file.yaml"))
        for found in (read["per_method"]["fedavg"], read["compare"]["variants"]["other"]):
            assert found["start"] == str(tmp_path / "sub" / "lora")
            assert found["privacy"] == {"secret": str(tmp_path / "sub" / "s")}
            assert found["backbone"] == {"name": str(tmp_path / "sub" / "own")}
            assert found["data"] == {"path": str(tmp_path / "rows")}

    def test_a_comparison_takes_them_from_there(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        entries = {"fedavg": {"federation.labelled": "./ours"}}
        variants = {"other": {"federation": {"labelled": "theirs"}}}
        tree = {"preset": "demo", "per_method": entries, "compare": {"variants": variants}}
        (tmp_path / "sub" / "file.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        cells = read_comparison("sub/file.yaml", ["methods=fedavg,local"]).cells
        ours, theirs = str(tmp_path / "sub" / "ours"), str(tmp_path / "sub" / "theirs")
        found = {cell.entry: cell.config.federation.labelled for cell in cells}
        assert found == {"fedavg": ours, "fedavg-other": theirs, "local": None, "local-other": theirs}


class TestOwnSilosOverAPreset:
    SILOS = [{"name": "a", "path": "a.csv"}]

    def test_its_setting_stays_and_its_data_set_goes(self) -> None:
        found = config(silos=self.SILOS)
        assert [silo.name for silo in found.silos] == ["a"]
        assert (found.data.set, found.data.tasks) == (None, [])
        assert (found.head.pooling, found.data.merge) == ("mean", True)
        assert config("silos=[{name: a, path: a.csv}]") == found

    def test_both_from_the_user_are_still_one_too_many(self) -> None:
        with pytest.raises(InputError, match=r"'silos' and 'data\.set' exclude each other"):
            config("data.set=glue", silos=self.SILOS)


class TestRoundTrip:
    @pytest.mark.parametrize("method", METHODS)
    def test_the_resolved_configuration_reads_back_the_same(self, method: str) -> None:
        found = config(f"method={method}", "seed=7", "train.lr=3e-4", "data.ratio=[0.5,0.25,0.25]")
        Path("config.yaml").write_text(dump(found), encoding="utf-8")
        again = read_config("config.yaml")
        assert again == found
        assert dump(again) == dump(found)

    @pytest.mark.parametrize("name", ["yes", "1e3", "2024", "null", "a b", "0x10"])
    def test_names_that_yaml_might_take_for_something_else(self, name: str) -> None:
        silo = {"name": name, "path": "rows.csv", "text": [name, "no"], "label": "on", "labels": [name, "off"]}
        Path("own.yaml").write_text(yaml.safe_dump({"silos": [silo], "description": "ü: [x]"}), encoding="utf-8")
        found = read_config("own.yaml")
        Path("config.yaml").write_text(dump(found), encoding="utf-8")
        assert read_config("config.yaml") == found
        assert found.silos[0].columns == (name, "no")

    def test_it_can_be_overridden_like_any_file(self) -> None:
        Path("config.yaml").write_text(dump(config("method=fedprox")), encoding="utf-8")
        found = read_config("config.yaml", ["method=local", "rounds=2"])
        assert (found.method.name, found.rounds) == ("local", 2)
        assert "mu" not in found.method.options
