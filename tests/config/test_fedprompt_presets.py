"""FedPrompt's presets: the paper's setting, from a folder and from the hub (played by data sets made here)."""

from __future__ import annotations

import json

import datasets
import pytest
from datasets import Dataset, DatasetDict

from silotune import InputError, read_config
from silotune.data.loading import load_silos

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
