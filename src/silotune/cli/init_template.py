"""The example that `silotune init` writes: a commented configuration and two silos' CSV files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from silotune.core.files import make_folder
from silotune.data.loading import demo_folder
from silotune.errors import require_unused
from silotune.models.tuners import TUNERS

CONFIG = """\
# A federation of your own silos. Run it with: silotune run {name}
# Any key can also be given on the command line: silotune run {name} method=fedavg rounds=4

method: fedmcp            # silotune methods lists them; silotune parts METHOD says what leaves a silo
rounds: 3
seed: 1

backbone: default         # offline MiniLM (silotune[demo]); or a hub id, or a local folder

tuner:
  name: bottleneck        # also {tuners}
  r: 16

head:
  name: mlp               # mlp or linear; verbalizer and lm read the backbone's own vocabulary
  scope: private          # private: each silo keeps its head; shared: all silos hold one task
  pooling: mean           # mean, by which MiniLM was trained, or first (the [CLS] token), the default

train:                    # one silo's training in one round
  lr: 1e-3
  epochs: 1
  batch_size: 16
  # batches: even         # all of nearly one size; silos on machines of their own demand it
  max_length: 64          # tokens; longer rows are cut

silos:                    # paths are relative to this file; formats: .csv .tsv .jsonl .parquet
  - name: reviews         # one file is split 6:2:2 into train, validation and test
    path: reviews.csv
    text: review          # the text column
    label: opinion        # label names are read from this column
  - name: support
    path: support.csv
    text: [first_question, second_question]   # two columns: pairs
    label: relation
    # task: duplicates    # silos of one task share label names (default: the silo's name)
    # labels: [different, duplicate]          # where the file does not show them all
    # metric: f1          # accuracy, f1, macro_f1, balanced_accuracy, mcc, auroc; rouge1 where answers are written
    # positive: duplicate # the label that F1 is about; without it F1 is the mean over all labels
  # a folder with train.csv, validation.csv and test.csv (or other formats) is taken as it is split
"""


def write_example(directory: Path) -> Path:
    """Write the example.

    Returns:
        Path of its configuration.
    """
    require_unused(directory)
    make_folder(directory, str(directory))
    _csv("sentiment", directory / "reviews.csv", ["review", "opinion"])
    _csv("duplicate_question", directory / "support.csv", ["first_question", "second_question", "relation"])
    path = directory / "federation.yaml"
    tuners = ", ".join(name for name in TUNERS if name != "bottleneck")
    path.write_text(CONFIG.format(name=path, tuners=tuners), encoding="utf-8")
    return path


def _csv(task: str, path: Path, columns: list[str]) -> None:
    folder = demo_folder() / task
    names = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["label_names"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            texts = [row[column] for column in ("sentence1", "sentence2") if column in row]
            writer.writerow([*texts, names[row["label"]]])
