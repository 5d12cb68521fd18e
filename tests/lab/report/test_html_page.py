"""The report's page: complete, self-contained, drawn by a browser without complaint, at both widths."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from silotune.lab.report.entries import read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.html_page import write_report
from tests.support.command_line import Silotune
from tests.support.report_runs import curve, write_run

FIGURES = {"tests": 1, "communication": 1, "rounds": 3, "losses": 4, "sent": 1, "seconds": 1}
"""Panels by figure, for the runs of the fixture."""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def sections(page: str) -> dict[str, str]:
    return dict(re.findall(r'<section id="(\w+)"[^>]*>(.*?)</section>', page, flags=re.DOTALL))


def sections_of(page: Path, *runs: Path) -> dict[str, str]:
    """The sections of a report on these runs."""
    return sections(write_report(Results(read_entries(runs)), page).read_text(encoding="utf-8"))


def test_every_figure_is_there_with_titled_axes(written: Path) -> None:
    page_sections = sections(written.read_text(encoding="utf-8"))
    assert {name: page_sections[name].count("<svg") for name in FIGURES} == FIGURES
    assert {"results", "costs", "left", "privacy", "attacks", "runs", "config"} <= set(page_sections)
    for name in FIGURES:
        for svg in re.findall(r"<svg.*?</svg>", page_sections[name], flags=re.DOTALL):
            ElementTree.fromstring(svg)
            assert re.search(r'aria-label="[^"]+: [^"]+ against [^"]+"', svg)
        for kind in ("png", "svg"):
            assert (written.parent / "figures" / f"{name}.{kind}").stat().st_size > 2000


def test_it_needs_nothing_from_outside(written: Path) -> None:
    page = written.read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]* (?:src|href)=\"(?!data:)", page)
    assert not re.findall(r"@import|url\((?!#)|fetch\(|XMLHttpRequest", page)
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    identities = re.findall(r' id="([^"]+)"', page)
    assert len(identities) == len(set(identities))
    for reference in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page):
        assert "".join(reference) in identities
    assert {"results", "classes", "privacy"} & set(re.findall(r'<li><a href="#([^"]+)">', page)), "the contents"


def test_what_it_says(written: Path) -> None:
    page = written.read_text(encoding="utf-8")
    assert '<td class="best">74.00 ± 2.00<small>69.0 to 79.0</small></td>' in page
    assert "prefers-color-scheme: dark" in page
    assert "var(--ink)" in page
    assert "name: fedmcp" in page  # the configuration
    assert "Bonferroni" in page


@pytest.mark.usefixtures("no_figure_files")
def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", "local", 1, {"a": 50.0}, message=0)
    page_sections = sections_of(tmp_path / "page.html", run)
    assert not {"communication", "sent"} & set(page_sections)
    assert {"tests", "rounds", "losses", "seconds"} <= set(page_sections)


@pytest.mark.usefixtures("no_figures")
def test_privacy_is_told_where_there_is_noise(tmp_path: Path) -> None:
    noised, plain = (write_run(tmp_path / name, name, 1, {"a": 50.0}) for name in ("fedavg", "local"))
    summary = json.loads((noised / "summary.json").read_text())
    summary["privacy"] = {"mechanism": "gaussian", "epsilon_round": 1.25, "epsilon_total": 3.5, "delta": 1e-5}
    summary["privacy"] |= {"participations": 7, "noise": "noise", "budget": None, "uncovered": "those who know <it>"}
    (noised / "summary.json").write_text(json.dumps(summary))
    privacy = sections_of(tmp_path / "page.html", noised, plain)["privacy"]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", privacy)
    assert cells == ["fedavg", "gaussian", "1.25", "3.5", "1e-05", "7"], "the noised run alone"
    assert "The guarantee does not hold against those who know &lt;it&gt;." in privacy
    privacy = sections_of(tmp_path / "plain.html", plain)["privacy"]
    assert "<td" not in privacy
    assert "No differential privacy" in privacy, "said where there is none, too"


@pytest.mark.usefixtures("no_figures")
def test_known_events_need_no_remark_and_other_versions_get_one(tmp_path: Path) -> None:
    extra = [{"event": "server", "round": 1, "loss": 0.5}, {"event": "versions", "changed": ["torch 2.0 → 2.1"]}]
    extra += [{"event": "cohort", "size": 1, "reason": "r"}, {"event": "odd"}]
    extra += [{"event": "budget", "round": 3, "reason": "ε is spent"}]
    runs = [write_run(tmp_path / f"r{seed}", "fedfame", seed, {"a": 50.0}, extra=extra) for seed in (1, 2, 3)]
    page = write_report(Results(read_entries(runs)), tmp_path / "page.html").read_text(encoding="utf-8")
    remarks = sections(page)["warnings"]
    assert remarks.count("r1 (seed 1) and 2 more: 1 × “odd”") == 1, "what several runs have is said once"
    assert "r2 (seed 2)" not in remarks
    assert "“cohort”" not in page
    assert "resumed under other versions: torch 2.0 → 2.1" in remarks
    assert "stopped after round 3: ε is spent" in remarks
    assert "“budget”" not in page
    assert "“server”" not in page
    assert "“versions”" not in page
    assert "“odd”" in remarks


@pytest.mark.usefixtures("no_figure_files")
def test_a_real_partitioned_run(tiny_config, tmp_path: Path) -> None:
    from silotune.runs.run import run

    words = ("data.tasks=[alpha]", "partition=dirichlet", "partition.silos=3", "head.scope=shared")
    for method in ("fedavg", "fedper"):
        own = words if method == "fedavg" else words[:-1]
        run(tiny_config(method, *own), out=tmp_path / method)
    entries = read_entries([tmp_path])
    page_sections = sections(write_report(Results(entries), tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page_sections["rounds"].count("<svg") == 1
    assert "<td" in page_sections["results"]
    for entry in entries:
        points = curve(entry, "validation")
        logged = [event["validation"]["global"] for event in entry.first.events_of("round")]
        assert (points["x"], points["mean"]) == ([1, 2], logged)


@pytest.mark.usefixtures("no_figure_files")
def test_long_names_leave_room_for_the_data(tmp_path: Path) -> None:
    """matplotlib warns where labels squeeze a diagram to nothing."""
    silos = {f"the {word} silo of a very long name without an end": 50.0 for word in ("first", "second")}
    paths = [
        write_run(tmp_path / name, "fedavg", 1, silos, more={"data": {"path": f"/a/long/path/of/folders/to/{name}"}})
        for name in ("one", "two")
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(Results(read_entries(paths)), tmp_path / "page.html")


@pytest.mark.usefixtures("no_figure_files")
def test_names_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", "a<b>&c", 1, {"x": 50.0})
    page = write_report(Results(read_entries([run])), tmp_path / "page.html", title="<i>").read_text(encoding="utf-8")
    assert "a<b>" not in page
    assert "<i>" not in page


MEASURE = """<script>
const faults = [];
for (const svg of document.querySelectorAll("svg")) {
  const box = svg.getBoundingClientRect();
  if (box.width < 200 || box.height < 100) faults.push("small " + svg.getAttribute("aria-label"));
  if (box.right > document.documentElement.clientWidth + 1) faults.push("outside " + svg.getAttribute("aria-label"));
}
if (document.documentElement.scrollWidth > window.innerWidth) faults.push("wide page");
for (const box of window.innerWidth < 1000 ? [] : document.querySelectorAll("#results .scroll"))
  if (box.scrollWidth > box.clientWidth) faults.push(`cut by ${box.scrollWidth - box.clientWidth} pixels`);
document.body.setAttribute("data-found", document.querySelectorAll("svg").length + " figures; " + faults.join("; "));
</script>"""


def measured(written: Path, folder: Path, width: int) -> tuple[str, list[str]]:
    """Draw a page, and return how many figures it has with their faults, and what the console says."""
    page = folder / "measured.html"
    page.write_text(written.read_text(encoding="utf-8").replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    words = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *(f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2000", "--enable-logging=stderr"),
        *("--dump-dom", f"file://{page}"),
    ]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    match = re.search(r'data-found="([^"]*)"', ended.stdout)
    assert match is not None, ended.stderr
    return match.group(1), [line for line in ended.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_it_without_complaint(written: Path, tmp_path: Path, width: int) -> None:
    """Every SVG has its size inside the page, the page does not scroll sideways, and the console stays empty."""
    assert measured(written, tmp_path, width) == (f"{sum(FIGURES.values())} figures; ", [])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.usefixtures("no_figures")
def test_results_of_eight_silos_are_not_cut_at_1280_pixels(tmp_path: Path) -> None:
    """As many as the demo has."""
    scores = {f"silo-{number}": 60.0 + number for number in range(1, 9)}
    runs = [write_run(tmp_path / method, method, 1, scores, test_rows=112) for method in ("local", "fedavg", "ditto")]
    page = write_report(Results(read_entries(runs)), tmp_path / "page.html")
    found, _ = measured(page, tmp_path, 1280)
    assert found.endswith(" figures; ")


@pytest.mark.usefixtures("no_figures")
def test_the_command(silotune: Silotune, runs: Path, tmp_path: Path) -> None:
    outcome = silotune("report", runs / "alone-1", runs / "sharing-2", "--out", tmp_path / "page.html")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"wrote {tmp_path / 'page.html'}" in outcome.out.splitlines()
    for words in (("report", tmp_path), ("report", runs, "--out", tmp_path)):
        refused = silotune(*words)
        refused.refusal(str(tmp_path))
