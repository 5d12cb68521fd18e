"""Make mixed6 and sentiment5 of their sources, as their authors distribute them.

Rows, splits and order are those of `published.npz`, which has a hash of four bytes for each row, so that everybody who
downloads the sources has the same data.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

from silotune.errors import InputError, file_errors

Rows = Iterable[tuple[str, int]]
"""Texts and their labels."""

_LONGEST = 1500
"""Characters at which mails and reviews are cut."""

_QUESTIONS = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")


@dataclass(frozen=True)
class Source:
    """Where a task comes from: what is cloned, its license, its label names, and how its rows are read.

    `read` yields the rows of the cloned folder.
    """

    repository: str
    commit: str
    license: str
    labels: tuple[str, ...]
    read: Callable[[Path], Rows]

    @property
    def card(self) -> dict[str, Any]:
        """What is written beside the rows."""
        return {"source": f"https://github.com/{self.repository}", "commit": self.commit, "license": self.license}


def _table(path: Path, **options: Any) -> Any:
    import pandas

    return pandas.read_csv(path, encoding="utf-8", **options)


def _hate(folder: Path) -> Rows:
    table = _table(folder / "data" / "labeled_data.csv")
    return zip(table["tweet"], table["class"], strict=True)


def _offensive(folder: Path) -> Rows:
    train = _table(folder / "olid-training-v1.0.tsv", sep="\t", quoting=3)
    test = _table(folder / "testset-levela.tsv", sep="\t", quoting=3)
    labels = _table(folder / "labels-levela.csv", header=None, index_col=0)[1]
    for texts, names in ((train["tweet"], train["subtask_a"]), (test["tweet"], test["id"].map(labels))):
        yield from zip(texts, (names == "OFF").astype(int), strict=True)


def _questions(folder: Path) -> Rows:
    with zipfile.ZipFile(folder / "packages" / "corpora" / "qc.zip") as archive:
        for split in ("train", "test"):
            for line in archive.read(f"qc/{split}.txt").decode("latin-1").splitlines():
                kind, text = line.split(" ", 1)
                yield text, _QUESTIONS.index(kind.partition(":")[0])


def _phrases(folder: Path) -> Rows:
    for split in ("train", "dev"):
        for line in (folder / "data" / "SST2" / f"{split}.tsv").read_text(encoding="utf-8").splitlines():
            text, label = line.rsplit("\t", 1)
            yield text, int(label)


def _sentences(folder: Path) -> Rows:
    with zipfile.ZipFile(folder / "packages" / "corpora" / "subjectivity.zip") as archive:
        for label, name in enumerate(("plot", "quote")):
            text = archive.read(f"subjectivity/{name}.tok.gt9.5000").decode("latin-1")
            yield from ((line.strip(), label) for line in text.split("\n"))


def _files(patterns: Sequence[str], encoding: str, folder: Path) -> Rows:
    for label, pattern in enumerate(patterns):
        for file in sorted(folder.glob(pattern)):
            yield file.read_text(encoding=encoding).replace("<br />", " ").strip()[:_LONGEST], label


def _rated(name: str, folder: Path) -> Rows:
    """Read people's mean ratings of a text, from −4 to 4: above 0 is positive (Hutto and Gilbert 2014)."""
    with tarfile.open(folder / "additional_resources" / "hutto_ICWSM_2014.tar.gz") as archive:
        file = archive.extractfile(f"hutto_ICWSM_2014/{name}_GroundTruth.txt")
        assert file is not None, "a file of an archive"
        for line in file.read().decode("utf-8", errors="replace").splitlines():
            _, rating, text = line.split("\t", 2)
            yield text.strip(), int(float(rating) > 0)


_TWEETS = "t-davidson/hate-speech-and-offensive-language", "cb50f7e9eb855a99abc51423bf40df0e26d6fe30", "MIT"
_OLID = "idontflow/OLID", "66fa62b22d57965986884d6b1491da2aed452f07", "unknown (OLID, for research)"
_NLTK = "nltk/nltk_data", "5db857e6f7df11eabb5e5665836db9ec8df07e28"
_SST = "clairett/pytorch-sentiment-classification", "457ffd83de90a9d6d472d8ffc31bbffe40a8b236", "unknown"
_SPAM = "gs73990-alt/CCS5600_LingSpam_NaiveBayes_Repository", "b7a1716223cd1f4320cc3791225641bd89d96a37"
_IMDB = "dax44/AMLM", "05fb2144cdac27a88f277b3969df58e2ae041af6", "unknown (for research)"
_VADER = "cjhutto/vaderSentiment", "44fc044cd877310ee8278a0eadf34bcd50d41d06", "MIT (of the repository)"
_MAILS = [f"data/lingspam_public/bare/part*/{name}.txt" for name in ("[!s]*", "spmsg*")]
_REVIEWS = [f"data/aclImdb/*/{name}/*.txt" for name in ("neg", "pos")]
_RATED = ("negative_or_zero", "positive")

SOURCES: dict[str, dict[str, Source]] = {
    "mixed6": {
        "hate": Source(*_TWEETS, ("hate", "offensive", "neither"), _hate),
        "offensive": Source(*_OLID, ("NOT", "OFF"), _offensive),
        "question_type": Source(*_NLTK, "unknown", _QUESTIONS, _questions),
        "sentiment": Source(*_SST, ("negative", "positive"), _phrases),
        "spam": Source(*_SPAM, "free for research", ("ham", "spam"), partial(_files, _MAILS, "latin-1")),
        "subjectivity": Source(*_NLTK, "CC BY 4.0", ("objective", "subjective"), _sentences),
    },
    "sentiment5": {
        "amazon": Source(*_VADER, _RATED, partial(_rated, "amazonReviewSnippets")),
        "imdb": Source(*_IMDB, ("negative", "positive"), partial(_files, _REVIEWS, "utf-8")),
        "movie_snippets": Source(*_VADER, _RATED, partial(_rated, "movieReviewSnippets")),
        "nyt_editorials": Source(*_VADER, _RATED, partial(_rated, "nytEditorialSnippets")),
        "tweets": Source(*_VADER, _RATED, partial(_rated, "tweets")),
    },
}
"""Data set → task → its source."""


def row_hash(text: str, label: int) -> int:
    """Return the hash by which a row is chosen."""
    return int.from_bytes(sha256(f"{label}\t{text}".encode()).digest()[:4], "big")


def wanted_rows(kind: str, task: str) -> dict[str, list[int]]:
    """Return split → the hashes of its rows in order."""
    import numpy as np

    with resources.files("silotune.lab").joinpath("published.npz").open("rb") as file:
        lists = np.load(file)
        return {name.rpartition("/")[2]: lists[name].tolist() for name in lists if name.startswith(f"{kind}/{task}/")}


def chosen_rows(kind: str, task: str, folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the splits of a task with their rows, from the folder that has its cloned source.

    Raises:
        InputError: the source is not there, or lacks a row.
    """
    source = SOURCES[kind][task]
    clone = folder / source.repository.partition("/")[2]
    if not clone.is_dir():
        raise InputError(
            f"{clone}: not there; git clone https://github.com/{source.repository} (commit {source.commit}) in {folder}"
        )
    with file_errors(f"{clone}: cannot be read as commit {source.commit}"):
        rows = {row_hash(text, int(label)): (text, int(label)) for text, label in source.read(clone)}
    for split, hashes in wanted_rows(kind, task).items():
        missing = sum(each not in rows for each in hashes)
        if missing:
            raise InputError(f"{clone}: lacks {missing:,} of {len(hashes):,} {split} rows; allowed: {source.commit}")
        yield split, [{"sentence1": rows[each][0], "label": rows[each][1]} for each in hashes]
