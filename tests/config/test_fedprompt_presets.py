"""Data of FedPrompt's presets, from a folder and from the hub (played by data sets made here)."""

from __future__ import annotations

import json

import datasets
import pytest
from datasets import Dataset, DatasetDict

from silotune import InputError, read_config
from silotune.data.loading import load_silos

HUB = {
    "imdb": (("stanfordnlp/imdb",), ("negative", "positive")),
    "offenseval": (("cardiffnlp/tweet_eval", "offensive"), ("NOT", "OFF")),
    "enron": (("SetFit/enron_spam",), ("ham", "spam")),
}
"""Task → what is asked of the hub, and its label names."""


@pytest.mark.parametrize("name", HUB)
def test_the_hubs_rows_have_the_folders_label_names(name, monkeypatch):
    asked = []

    def load_dataset(*words):
        asked.append(words)
        rows = {"text": [f"text {n}" for n in range(39)] + ["  "], "label": [n % 2 for n in range(40)]}
        return DatasetDict({split: Dataset.from_dict(rows) for split in ("train", "validation", "test")})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    silos = load_silos(read_config(f"fedprompt-{name}"))
    assert (asked, silos[0].task.labels) == ([HUB[name][0]], HUB[name][1])
    rows = [found for silo in silos for found in silo.splits.train]
    assert len(rows) == 39  # one has no text
    assert all(int(found.texts[0].split()[1]) % 2 == found.label for found in rows)


def test_what_is_not_on_the_hub_needs_a_folder():
    with pytest.raises(InputError, match=r"data.path: lingspam of data set 'fedprompt' needs a folder"):
        load_silos(read_config("fedprompt-lingspam"))


def test_a_stray_nul_in_a_published_text_reads_as_a_blank(tmp_path):
    (tmp_path / "enron").mkdir()
    (tmp_path / "enron" / "meta.json").write_text(json.dumps({"label_names": ["ham", "spam"]}))
    rows = [{"sentence1": f"be\0fore {number}", "label": number % 2} for number in range(60)]
    for split in ("train", "test"):
        (tmp_path / "enron" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    silos = load_silos(read_config("fedprompt-enron", [f"data.path={tmp_path}"]))
    assert "be fore 0" in {found.texts[0] for silo in silos for found in silo.splits.train}
