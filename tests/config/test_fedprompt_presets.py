"""FedPrompt's presets: the paper's setting, from a folder and from the hub (played by data sets made here)."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, DatasetDict

from silotune import InputError, read_config
from silotune.config import preset_names
from silotune.data.loading import load_silos
from silotune.distributed.protocol.agreement import check_federated
from silotune.lab.comparison import read_comparison
from silotune.runs.build.resolve import make_method

TASKS = {
    "sst2": ("SST-2", ("negative", "positive")),
    "imdb": ("imdb", ("negative", "positive")),
    "offenseval": ("offenseval", ("NOT", "OFF")),
    "enron": ("enron", ("ham", "spam")),
    "lingspam": ("lingspam", ("ham", "spam")),
    "qnli": ("QNLI", ("entailment", "not_entailment")),
    "rte": ("RTE", ("entailment", "not_entailment")),
}
PAIRS = ("qnli", "rte")
HUB = {
    "imdb": ("stanfordnlp/imdb",),
    "offenseval": ("cardiffnlp/tweet_eval", "offensive"),
    "enron": ("SetFit/enron_spam",),
}


def row(name, number):
    second = {"sentence2": f"other {number}"} if name in PAIRS else {}
    return {"sentence1": f"text {number}", **second, "label": number % 2}


def folder(path, name):
    task, labels = TASKS[name]
    (path / task).mkdir(parents=True)
    (path / task / "meta.json").write_text(json.dumps({"label_names": labels}))
    for split, count in (("train", 60), ("test", 20)):
        lines = "\n".join(json.dumps(row(name, number)) for number in range(count))
        (path / task / f"{split}.jsonl").write_text(lines)
    return path


@pytest.mark.parametrize("name", TASKS)
def test_the_rows_of_table_2(name, tmp_path):
    """IID and by quantity, clean and poisoned; the clean federations are measured with the trigger, too."""
    words = [f"data.path={folder(tmp_path, name)}", "attack=backdoor", "attack.fraction=0", "seeds=1,2"]
    found = read_comparison(f"fedprompt-{name}", words)
    rows = {
        cell.entry.removeprefix("fedprompt").removeprefix("-"): (
            cell.config.partition.name,
            cell.config.partition.alpha if cell.config.partition.name == "quantity" else None,
            cell.config.attack.fraction,
        )
        for cell in found.cells
    }
    assert rows == {
        "": ("iid", None, 0),
        "noniid": ("quantity", 0.5, 0),
        "poisoned": ("iid", None, 0.1),
        "noniid-poisoned": ("quantity", 0.5, 0.1),
    }
    assert {cell.config.attack.name for cell in found.cells} == {"backdoor"}
    assert {cell.config.partition.silos for cell in found.cells} == {10}
    assert len(found.cells) == 8


@pytest.mark.parametrize("name", TASKS)
def test_the_papers_setting(name, tmp_path):
    config = read_config(f"fedprompt-{name}", [f"data.path={folder(tmp_path, name)}"])
    assert (config.method.name, config.tuner.name, config.tuner.options["tokens"]) == ("fedprompt", "prompt", 20)
    assert (config.rounds, config.train.steps, config.train.lr, config.train.optimizer) == (50, 1000, 0.3, "adam")
    assert (config.aggregation.name, config.head.name) == ("samples", "verbalizer")
    assert config.backbone.name == "google-bert/bert-base-uncased"
    silos = load_silos(config)
    assert len(silos) == 10
    assert [len(silo.splits.train) for silo in silos] == [6] * 10
    task, labels = TASKS[name]
    assert {(silo.task.name, silo.task.labels) for silo in silos} == {(task, labels)}
    words = config.head.words
    assert set(words) == set(labels)
    assert all(len(chosen) == 1 for chosen in words.values())  # one-to-one
    assert config.attack.target in labels
    assert config.attack.name == "none"
    assert make_method(config).setting.head.template(silos[0].task, 2 if name in PAIRS else 1)
    check_federated(config)  # an attack that is prepared is not made


@pytest.mark.parametrize("name", HUB)
def test_the_hubs_rows_have_the_folders_label_names(name, monkeypatch):
    asked = []

    def load_dataset(*words):
        asked.append(words)
        rows = {"text": [f"text {n}" for n in range(39)] + ["  "], "label": [n % 2 for n in range(40)]}
        return DatasetDict({split: Dataset.from_dict(rows) for split in ("train", "validation", "test")})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    silos = load_silos(read_config(f"fedprompt-{name}"))
    assert asked == [HUB[name]]
    assert silos[0].task.labels == TASKS[name][1]
    rows = [found for silo in silos for found in silo.splits.train]
    assert len(rows) == 39  # one has no text
    assert all(int(found.texts[0].split()[1]) % 2 == found.label for found in rows)


def test_what_is_not_on_the_hub_needs_a_folder():
    with pytest.raises(InputError, match=r"data.path: lingspam of data set 'fedprompt' needs a folder"):
        load_silos(read_config("fedprompt-lingspam"))


def test_a_stray_nul_in_a_published_text_reads_as_a_blank(tmp_path):
    path = folder(tmp_path, "enron")
    with (path / "enron" / "train.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"sentence1": "be\0fore", "label": 0}))
    silos = load_silos(read_config("fedprompt-enron", [f"data.path={path}"]))
    assert "be fore" in {found.texts[0] for silo in silos for found in silo.splits.train}


def test_seven_presets():
    assert {name for name in preset_names() if name.startswith("fedprompt-")} >= {f"fedprompt-{name}" for name in TASKS}


SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.mark.skipif(not (SHARED / "models" / "minilm-mlm").is_dir(), reason="a masked language model lies beside here")
@pytest.mark.parametrize("name", ["enron", "rte"])
def test_two_steps_on_the_real_data(name, tmp_path):
    from silotune.runs.run import run

    data = SHARED / "data" / ("fedprompt" if name == "enron" else "glue")
    words = [f"data.path={data}", f"backbone={SHARED / 'models' / 'minilm-mlm'}", "rounds=1", "train.steps=2"]
    words += ["train.batch_size=4", "data.rows=40", "data.validation_rows=2", "data.test_rows=6", "threads=1"]
    words += ["partition.silos=2"]
    words += ["attack=backdoor", "attack.position=end", "precision=fp32", "train.max_length=48"]
    summary = run(read_config(f"fedprompt-{name}", words), out=tmp_path / "run").summary
    assert summary["sent_parameters"] == 20 * 384
    assert len(summary["attack"]["malicious"]) == 1
    assert 0 <= summary["attack"]["asr"] <= 100
