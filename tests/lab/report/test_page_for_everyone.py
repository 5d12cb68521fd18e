"""The report says what it must, marks no winner without evidence, stays readable with 40 silos, and is accessible."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from silotune.core.notebook import COLORS
from silotune.lab.report.entries import read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.html_page import write_report
from tests.support.report_runs import write_run

STYLE = files("silotune.lab.report").joinpath("templates/style.css").read_text(encoding="utf-8")

VOID = {"meta", "link", "br", "img", "input"}


def page_of(folder: Path) -> str:
    return write_report(Results(read_entries([folder])), folder / "page.html").read_text(encoding="utf-8")


def with_summary(run: Path, **more: object) -> Path:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | more))
    return run


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(("low", "clear"), [(70.0, True), (60.0, False)])
def test_a_winner_is_marked_only_where_intervals_are_apart(tmp_path: Path, low: float, clear: bool) -> None:
    """`better` is 20 points ahead; whether that shows something depends on its interval."""
    bounds = {"better": [low, 90.0], "worse": [50.0, 65.0]}
    for name, score in (("better", 80.0), ("worse", 60.0)):
        run = write_run(tmp_path / name, name, 1, {"a": score})
        with_summary(run, intervals={"silos": {"a": bounds[name]}, "global": None})
    page = page_of(tmp_path)
    assert ('<td class="best clear">80.00<small>' in page) is clear
    assert ('<td class="best">80.00<small>' in page) is not clear
    assert "<small>50.0 to 65.0</small>" in page


def test_intervals_over_seeds_are_students(tmp_path: Path) -> None:
    from scipy.stats import t

    for seed, score in ((1, 70.0), (2, 72.0), (3, 77.0)):
        write_run(tmp_path / f"r-{seed}", "fedavg", seed, {"a": score, "b": 99.0 + seed / 3})
    (entry,) = read_entries([tmp_path])
    bounds = Results([entry]).interval(entry, "a")
    assert bounds == pytest.approx(t.interval(0.95, 2, loc=73.0, scale=(13 / 3) ** 0.5))
    beside = Results([entry]).interval(entry, "b")
    assert beside is not None
    assert beside[1] == 100.0, "no score above the metric's largest"
    assert Results([entry]).clear_winners("a") == [False], "nobody wins alone"


@pytest.mark.usefixtures("no_figures")
def test_metric_rows_and_classes_of_every_silo_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", "fedavg", 1, {"a": 50.0}, metric="f1")
    tasks = {"a": {"name": "spam", "labels": ["ham", "spam"], "positive": "spam"}}
    with_summary(run, tasks=tasks)
    per_class = {
        name: {"precision": 1.0, "recall": 2.0, "f1": value, "rows": rows}
        for name, value, rows in (("ham", 61.5, 15), ("spam", 40.5, 5))
    }
    details = {"metric": "f1", "score": 50.0, "rows": 20, "metrics": {"f1": 50.0}, "intervals": {"f1": [40.0, 60.0]}}
    details |= {"per_class": per_class, "confusion": [[12, 3], [1, 4]], "positive": "spam"}
    (run / "scores.json").write_text(json.dumps({"silos": {"a": details}, "global": None}))
    page = page_of(tmp_path)
    assert "F1 of spam, 20 rows" in page
    assert "ham (15), spam (5)" in page
    assert re.search(r'<th scope="row">a: spam</th>\s*<td>5</td>\s*<td>40.50</td>', page)
    assert re.search(r'<td style="--share:0.20">3</td>', page)


@pytest.mark.usefixtures("no_figures")
def test_privacy_attack_and_traffic_are_always_stated(tmp_path: Path) -> None:
    attack = {"attack": {"name": "backdoor", "fraction": 0.25, "target": "no"}, "aggregation": {"name": "median"}}
    run = write_run(tmp_path / "attacked", "fedavg", 1, {"a": 50.0}, more=attack)
    with_summary(run, attack={"accuracy": 50.0, "asr": 12.5})
    write_run(tmp_path / "plain", "local", 1, {"a": 50.0}, message=0)
    page = html.unescape(page_of(tmp_path))
    assert "Backdoor by 25 % of the silos toward the label 'no': success 12.50 % of" in page
    assert "Aggregation: median." in page
    assert "No attack was simulated." in page
    assert "Nothing was sent, so nothing needed protection" in page
    assert "No differential privacy: updates left the silos without noise." in page
    assert "3.00 MiB from silos and 3.00 MiB to them" in page


@pytest.mark.long
@pytest.mark.usefixtures("no_figure_files")
def test_forty_silos_stay_readable(tmp_path: Path) -> None:
    names = [f"silo-{number:02d}" for number in range(40)]
    for method, base in (("fedavg", 60.0), ("local", 50.0)):
        write_run(tmp_path / method, method, 1, {name: base + n / 4 for n, name in enumerate(names)})
    page = page_of(tmp_path)
    rounds = re.search(r'<section id="rounds".*?</section>', page, re.DOTALL)
    assert rounds is not None
    assert "spread over 40 silos" in rounds.group()
    assert re.findall(r"<option[^>]*>(.*?)</option>", page) == ["all", *names]
    tests = re.search(r'<section id="tests".*?</section>', page, re.DOTALL)
    assert tests is not None
    shown = [json.loads(html.unescape(found)) for found in re.findall(r'data-marks="([^"]*)"', tests.group())]
    dots = {text for _, _, text in shown[0]}
    assert {f"{name}, fedavg: {60 + n / 4:.4g} " for n, name in enumerate(names)} <= dots, (
        "all silos, not the first few"
    )
    assert len(page) < 2_500_000


class Elements(HTMLParser):
    """Faults of a page by rules of WCAG 2.2 that a parser can judge."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[int] = []
        self.faults: list[str] = []
        self.labels: set[str] = set()
        self.controls: set[str] = set()
        self.landmarks: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if re.fullmatch(r"h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if tag == "html" and not given.get("lang"):
            self.faults.append("no language")
        if tag == "svg" and not (given.get("role") == "img" and given.get("aria-label")):
            self.faults.append("a figure without a name")
        if tag == "label":
            self.labels.add(str(given.get("for")))
        if tag in ("select", "input"):
            self.controls.add(str(given.get("id")))
        if tag == "th" and given.get("scope") not in ("row", "col"):
            self.faults.append("a head of a table without scope")
        if given.get("class") == "scroll" and not (given.get("tabindex") == "0" and given.get("aria-label")):
            self.faults.append("what scrolls cannot be reached by keyboard")
        if tag in ("main", "nav", "header"):
            self.landmarks.append(tag)
        if tag not in VOID and "svg" not in self.open:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass


def test_names_landmarks_and_headings(written: Path) -> None:
    page = written.read_text(encoding="utf-8")
    found = Elements()
    found.feed(page)
    assert found.faults == []
    assert sorted(found.landmarks) == ["header", "main", "nav"]
    assert found.controls == found.labels == {"silo"}
    assert found.levels.count(1) == 1
    assert all(deeper - level <= 1 for level, deeper in zip(found.levels, found.levels[1:], strict=False))
    assert re.search(r"<title>.+</title>", page)
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        (marks,) = [json.loads(ElementTree.fromstring(svg).attrib["data-marks"])]
        assert marks, "every figure names its values"
        assert all(0 <= x <= 100 and 0 <= y <= 100 for x, y, _ in marks)


def luminance(color: str) -> float:
    color = "#" + "".join(2 * letter for letter in color[1:]) if len(color) == 4 else color
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def palettes() -> Iterator[dict[str, str]]:
    """The variables of the light and the dark theme."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        yield dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", block))


def test_contrast_is_enough_in_both_themes() -> None:
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    for palette in palettes():
        for ground in ("ground", "card"):
            for ink in ("ink", "soft", "mark", "link"):
                assert contrast(palette[ink], palette[ground]) >= 4.5, (ink, ground)  # WCAG 1.4.3
            for color in COLORS:
                assert contrast(color, palette[ground]) >= 3, (color, palette[ground])  # WCAG 1.4.11
        assert contrast(palette["warn-ink"], palette["warn"]) >= 4.5
