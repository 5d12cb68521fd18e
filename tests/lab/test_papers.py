"""Every table and figure of the four papers has a command, and what `compare` runs for it runs, at a toy size."""

from __future__ import annotations

import json
import shlex
from copy import deepcopy
from pathlib import Path

import pytest

from silotune.config import preset_names, preset_tree
from silotune.lab.commands.compare import read_papers
from silotune.lab.compare import entries_of
from silotune.lab.comparison import read_comparison
from silotune.lab.report.frame import Results
from silotune.lab.report.html_page import write_report
from silotune.lab.runner import run_cells
from silotune.runs.build.resolve import read_config
from tests.support.command_line import Silotune
from tests.support.language_models import made
from tests.support.tiny import BAD, GOOD, NOUNS

CHECKLIST = {
    "fedmcp": ["Table I", "Table II", "Figure 3", "Figure 4", "Figure 5"],
    "peft-in-fl": [*(f"Table {n}" for n in range(1, 6)), *(f"Figure {n}" for n in range(1, 6))],
    "fedprompt": [f"Table {n}" for n in range(1, 6)],
    "feddpa": [*(f"Table {n}" for n in range(1, 15)), *(f"Figure {n}" for n in (3, 4, 5)), "Appendix C.1"],
}
ITEMS = [item for paper in read_papers().values() for item in paper["items"].values()]
COMMANDS = sorted({command for item in ITEMS for command in item["commands"]})
COMPARED = sorted({words[2] for words in map(shlex.split, COMMANDS) if words[:2] == ["silotune", "compare"]})

BACKBONES = {
    "FacebookAI/roberta-base": "roberta",
    "google-bert/bert-base-uncased": "bert",
    "google-t5/t5-base": "t5",
    "huggyllama/llama-7b": "llama",
    "huggyllama/llama-13b": "llama",
}
SINGLE = ("SST-2", "imdb", "offenseval", "enron", "lingspam")
PAIRS = ("RTE", "QNLI", "MNLI", "MRPC", "QQP")
NAMES = {
    **dict.fromkeys(("SST-2", "imdb"), ("negative", "positive")),
    **dict.fromkeys(("enron", "lingspam"), ("ham", "spam")),
    **dict.fromkeys(("RTE", "QNLI"), ("entailment", "not_entailment")),
    **dict.fromkeys(("MRPC", "QQP"), ("different", "same")),
    "offenseval": ("NOT", "OFF"),
    "MNLI": ("entailment", "neutral", "contradiction"),
}
WORDS = ("bad", "good", "normal", "junk", "offensive", "yes", "no")
"""Label words of FedPrompt's presets, which the tiny tokenizers lack."""
INSTRUCTIONS = sorted(
    {task for name in ("table14-feddpa", "feddpa-dataset2") for task in preset_tree(name)["data"]["tasks"]}
)
TOY = (
    *("seeds=3", "data.path=data", "rounds=1", "train.steps=1", "train.batch_size=4", "train.max_length=48"),
    *("threads=1", "precision=fp32", "evaluation.bootstrap=0", "evaluation.baselines=false"),
    "evaluation.predictions=false",
)


def toy_words(preset: str) -> list[str]:
    """The words that make a preset's comparison small."""
    tree = preset_tree(preset)
    words = list(TOY)
    if "partition" in tree:
        words += ["partition.silos=2"]
    if "server" in tree:
        words += ["server.labels_per_class=2"]
    if tree["data"].get("merge"):
        words += ["data.rows_per_silo=20"]
    if tree.get("head", {}).get("name") == "lm":
        words += ["head.beams=1", "head.max_new_tokens=2", "backbone.quantization=none"]
        absent = [task for key in ("unseen", "new_silos") for task in tree["evaluation"].get(key, [])]
        words += [f"data.tasks=[{','.join(dict.fromkeys(['snli', 'cola', *absent]))}]"]
    if "parts" in tree["data"]:
        words += ["data.parts=2"]
    return words


def write_toy_data(folder: Path) -> None:
    for task in (*SINGLE, *PAIRS):
        (folder / task).mkdir(parents=True)
        (folder / task / "meta.json").write_text(json.dumps({"label_names": NAMES[task]}))
        for split, count in (("train", 24), ("validation", 12)):
            rows = []
            for n in range(count):
                label = n % len(NAMES[task])
                second = {"sentence2": f"a {NOUNS[n % 7]}"} if task in PAIRS else {}
                text = f"the {NOUNS[n % 10]} was {(GOOD, BAD)[label % 2][n % 6]}"
                rows.append({"sentence1": text, **second, "label": label})
            (folder / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task in INSTRUCTIONS:
        (folder / task).mkdir()
        for split, count in (("train", 10), ("test", 2)):
            rows = [{"instruction": f"say {GOOD[n % 6]} {NOUNS[n % 10]}", "output": GOOD[n % 6]} for n in range(count)]
            (folder / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the papers' backbones, tiny, under their ids, and with all tasks in `data`."""
    folder = tmp_path_factory.mktemp("toys")
    write_toy_data(folder / "data")
    for name, family in BACKBONES.items():
        model, tokenizer = map(deepcopy, made(family))
        if family != "llama":
            tokenizer.add_tokens(list(WORDS))
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def test_every_item_of_the_checklist_has_a_command() -> None:
    papers = read_papers()
    named = {name: list(paper["items"]) for name, paper in papers.items()}
    assert {name: [item for item in items if item in CHECKLIST[name]] for name, items in named.items()} == CHECKLIST
    assert all(item["shows"] and item["commands"] for item in ITEMS)


def test_the_list_prints_every_item_with_its_commands(silotune: Silotune) -> None:
    outcome = silotune("compare", "--list")
    assert (outcome.code, outcome.err) == (0, "")
    for paper in read_papers().values():
        assert paper["title"] in outcome.out
        for name, item in paper["items"].items():
            assert f"{name}: {item['shows']}\n" in outcome.out
            assert all(f"      {command}\n" in outcome.out for command in item["commands"])
    alone = silotune("compare", "feddpa", "--list")
    assert "Table 14" in alone.out
    assert "Table I:" not in alone.out
    assert "unknown paper 'feddpb' (did you mean 'feddpa'?)" in silotune("compare", "feddpb", "--list").err
    refused = silotune("compare", "--out", "out")
    refused.refusal("silotune compare --list")


def test_commands_name_what_there_is() -> None:
    for words in map(shlex.split, COMMANDS):
        if words[0] == "python":
            assert words[:3] == ["python", "-m", "benchmarks"]
        elif words[1] in ("compare", "sweep", "data"):
            assert words[2] in preset_names()
        else:
            assert words[:2] in (["silotune", "cost"], ["silotune", "transfer"], ["silotune", "personalization"])


@pytest.mark.parametrize("task", ["sst2", "rte", "qnli", "mnli", "mrpc", "qqp"])
def test_fedavg_beside_fedfame_differs_in_the_method_alone(task: str) -> None:
    words = ["method=fedavg", "server.labels_per_class="]
    one, other = (read_config(f"{kind}-{task}", words) for kind in ("fedfame", "fedavg-peft"))
    assert one.model_copy(update={"description": other.description}) == other


def some_rows(preset: str) -> list[str]:
    """Patterns of rows in which every variant of every group of the grid occurs with every method; none: all rows."""
    compare = preset_tree(preset)["compare"]
    groups = [list(group) for group in compare.get("grid", {}).values()]
    longest = max(map(len, groups), default=0)
    names = ["-".join(group[n % len(group)] for group in groups) for n in range(longest)]
    return [f"*-{name}" for name in [*names, *(compare.get("variants", {}) if groups else ())]]


def run_toy(preset: str, rows: list[str], out: Path) -> int:
    """Run a comparison at a toy size, and write its tables; returns the number of its runs."""
    comparison = read_comparison(preset, toy_words(preset), only=rows)
    comparison.write(out)
    summaries = run_cells(comparison.cells, out)
    assert all((out / name / "summary.json").is_file() for name in summaries)
    page = write_report(Results(entries_of(comparison, out, summaries), comparison.ddof), out / "report.html")
    named = {cell.config.backbone.name for cell in comparison.cells}
    assert all(name in page.read_text(encoding="utf-8") for name in named)
    return len(summaries)


@pytest.mark.long
@pytest.mark.parametrize("preset", COMPARED)
def test_a_comparison_runs_at_a_toy_size(
    preset: str, toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(toys)
    assert run_toy(preset, some_rows(preset), tmp_path) > 0


@pytest.mark.usefixtures("no_figures")
def test_one_row_runs_at_a_toy_size(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(toys)
    assert run_toy("table3-fedprompt", ["*-tokens-5"], tmp_path) == 1
