"""What a comparison runs: rows, seeds, and each cell's configuration. Nothing trains here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from silotune.config import dump, preset_tree
from silotune.errors import InputError
from silotune.lab.comparison import ABLATIONS, read_comparison
from silotune.runs.build.resolve import read_config

COMPARE = {
    "methods": ["local", "moon"],
    "seeds": [4, 5],
    "std": {"ddof": 0},
    "variants": {"slow": {"train.lr": 1e-5, "sampling": {"count": 2}}},
}


def written(folder: Path, **keys: object) -> str:
    path = folder / "mine.yaml"
    path.write_text(
        yaml.safe_dump({"preset": "demo", "per_method": {"moon": {"method.mu": 5}}} | keys, sort_keys=False)
    )
    return str(path)


def test_a_users_file_says_it_all(tmp_path: Path) -> None:
    comparison = read_comparison(written(tmp_path, compare=COMPARE), [])
    assert comparison.entries == ("local", "local-slow", "moon", "moon-slow")
    assert (comparison.seeds, comparison.ddof) == ((4, 5), 0)
    assert {c.entry: (c.config.train.lr, c.config.sampling.count) for c in comparison.cells} == {
        "local": (1e-3, None),
        "local-slow": (1e-5, 2),
        "moon": (1e-3, None),
        "moon-slow": (1e-5, 2),
    }
    assert {c.config.method.options["mu"] for c in comparison.cells if c.entry.startswith("moon")} == {5}
    # the command line is over the file; variants of its own replace those of the file
    comparison = read_comparison(
        str(tmp_path / "mine.yaml"), ["methods=ditto", "seeds=7", "std.ddof=1"], ["two: rounds=2"]
    )
    assert ([cell.folder for cell in comparison.cells], comparison.ddof) == (["ditto-7", "ditto-two-7"], 1)
    comparison = read_comparison(written(tmp_path, compare={"methods": "fedmcp", "ablation": True}, seed=3), [])
    assert (len(comparison.entries), comparison.seeds) == (1 + len(ABLATIONS["fedmcp"]), (3,))


def test_a_run_of_that_file_is_the_same_as_without(tmp_path: Path) -> None:
    alone = dump(read_config(written(tmp_path)))
    assert dump(read_config(written(tmp_path, compare=COMPARE))) == alone


def test_the_best_of_a_sweep_stands_between_the_file_and_the_words(tmp_path: Path) -> None:
    for name, entries in {
        "one": {"local": {"train.lr": 1e-5}, "moon": {}},
        "two": {"moon": {"method.mu": 0.1}},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "best.yaml").write_text(yaml.safe_dump({"per_method": entries}))
    asked = {"methods": ["local", "moon"], "best": ["one", "two"]}  # beside the file
    source = written(tmp_path, compare=asked, train={"lr": 0.5})
    configs = {cell.entry: cell.config for cell in read_comparison(source, []).cells}
    assert (configs["local"].train.lr, configs["moon"].train.lr) == (1e-5, 0.5)
    assert configs["moon"].method.options["mu"] == 0.1  # the file's own per_method says 5
    configs = {cell.entry: cell.config for cell in read_comparison(source, ["train.lr=0.25"]).cells}
    assert {config.train.lr for config in configs.values()} == {0.25}
    with pytest.raises(InputError, match="has nothing for method 'ditto', only for local, moon"):
        read_comparison(source, ["methods=local,ditto"])
    with pytest.raises(InputError, match="no finished sweep there"):
        read_comparison(source, [f"best={tmp_path / 'three'}"])


@pytest.mark.parametrize(
    ("compare", "named"),
    [
        ({"methods": ["local", "moan"]}, "did you mean 'moon'"),
        ({"methods": [""]}, "compare.methods"),
        ({"methods": None}, "compare.methods"),
        ({"seeds": [1, 2.5]}, "compare.seeds"),
        ({"seeds": [True]}, "compare.seeds"),
        ({"seed": [1]}, "compare.seed"),
        ({"std": {"ddof": 2}}, "compare.std.ddof"),
        ({"variants": {"a b": {"rounds": 1}}}, "'a b'"),
        ({"variants": {"slow": {"rounds": -1}}}, "rounds"),
        ({"variants": ["slow"]}, "compare.variants"),
        ({"best": ["nowhere"]}, "no finished sweep there"),
        ([1], "compare"),
    ],
)
def test_a_bad_section_is_refused(tmp_path: Path, compare: object, named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)) as refused:
        read_comparison(written(tmp_path, compare=compare), [])
    assert "\n" not in str(refused.value)


def test_a_variant_changes_what_was_said_of_its_method() -> None:
    words = ["methods=local,fedavg", "per_method.local.train.lr=5e-4", "train.lr=2e-3"]
    comparison = read_comparison("demo", words, ["slow: train.lr=1e-4"])
    assert [cell.config.train.lr for cell in comparison.cells] == [5e-4, 1e-4, 2e-3, 1e-4]


def test_without_methods_and_seeds_it_is_the_presets_own_method_once() -> None:
    comparison = read_comparison("demo", [])
    assert [cell.folder for cell in comparison.cells] == ["fedmcp-1"]
    assert comparison.ddof == 1


@pytest.mark.parametrize(
    ("words", "variants", "ablation", "named"),
    [
        (["methods=local,,fedavg"], [], False, "methods"),
        (["methods=local,local"], [], False, "'local' appears twice"),
        (["seeds=1,x"], [], False, "seeds"),
        (["seeds=-1"], [], False, "seeds"),
        (["seeds=1,1"], [], False, "seeds: 1 appears twice"),
        (["seed=3"], [], False, "seeds=3"),
        (["method=local"], [], False, "methods=local"),
        (["methods=local,fedmcp", "method.gamma=0.2"], [], False, "method.gamma"),
        ([], ["slow"], False, "--variant 'slow'"),
        ([], ["a b: rounds=1"], False, "--variant"),
        ([], ["a: rounds=1", "a: rounds=2"], False, "'a' appears twice"),
        ([], ["a: rounds=-1"], False, "rounds"),
        (["methods=fedavg,fedavg-full"], ["full: rounds=1"], False, "two entries would be called 'fedavg-full'"),
        (["methods=fedavg"], [], True, "'fedavg'"),
    ],
)
def test_a_bad_comparison_is_refused(words: list[str], variants: list[str], ablation: bool, named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)) as refused:
        read_comparison("demo", words, variants, ablation)
    assert "\n" not in str(refused.value)


GRID = {
    "size": {"small": {"rounds": 2}, "large": {"rounds": 9}},
    "rate": {"slow": {"train.lr": 1e-5}, "own": {}},
}


def test_a_grid_has_an_entry_for_every_combination_and_none_of_its_own(tmp_path: Path) -> None:
    source = written(tmp_path, compare={"methods": ["local", "moon"], "grid": GRID, "variants": {"odd": {"rounds": 3}}})
    cells = {cell.entry: (cell.config.rounds, cell.config.train.lr) for cell in read_comparison(source, []).cells}
    expected = {"small-slow": (2, 1e-5), "small-own": (2, 1e-3), "large-slow": (9, 1e-5), "large-own": (9, 1e-3)}
    expected["odd"] = (3, 1e-3)
    assert cells == {f"{method}-{entry}": keys for method in ("local", "moon") for entry, keys in expected.items()}
    replaced = read_comparison(source, ["methods=local"], ["two: rounds=4"])
    assert replaced.entries == ("local", "local-two")
    with pytest.raises(InputError, match=r"compare.grid.size: 'a b' cannot be a name"):
        read_comparison(written(tmp_path, compare={"grid": {"size": {"a b": {}}}}), [])


def test_only_some_entries(tmp_path: Path) -> None:
    source = written(tmp_path, compare={"methods": ["local", "moon"], "grid": GRID})
    found = read_comparison(source, ["seeds=1,2"], only=["moon-*-slow", "local-large-own"])
    assert found.entries == ("local-large-own", "moon-small-slow", "moon-large-slow")
    assert len(found.cells) == 6
    with pytest.raises(InputError, match=r"--only 'fedavg\*': fits none of the 8 entries \(local-small-slow"):
        read_comparison(source, [], only=["moon-*", "fedavg*"])


def test_a_variant_over_another_preset(tmp_path: Path) -> None:
    """Keys of the source stay, those of its preset go; without a preset of the source there is nothing to exchange."""
    source = written(
        tmp_path, rounds=7, compare={"methods": ["fedavg"], "variants": {"glue": {"preset": "fedmcp-glue"}}}
    )
    cells = {cell.entry: cell.config for cell in read_comparison(source, []).cells}
    assert cells["fedavg"].data.set == "demo"
    assert (cells["fedavg-glue"].data.set, cells["fedavg-glue"].data.rows_per_silo) == ("glue", 4076)
    assert {config.rounds for config in cells.values()} == {7}
    with pytest.raises(InputError, match="preset=fedmcp-glue: preset 'demo' has no base"):
        read_comparison("demo", [], ["glue: preset=fedmcp-glue"])
    with pytest.raises(InputError, match="unknown preset 'fedmcp-gleu'"):
        read_comparison(source, [], ["glue: preset=fedmcp-gleu"])


def test_a_preset_over_another_takes_all_but_its_comparison() -> None:
    base, derived = preset_tree("table1-glue"), preset_tree("grids-glue")
    assert base["compare"]["seeds"] == [1, 2, 3]
    assert derived["compare"].keys() == {"methods", "seeds", "variants"}
    differ = {key for key in derived if derived[key] != base.get(key)}
    assert differ == {"description", "compare"}
    assert preset_tree("grids-glue", "demo")["data"]["set"] == "demo"
