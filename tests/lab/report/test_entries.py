"""From run folders to rows, and their numbers by hand."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from silotune.cli.result_table import result_table
from silotune.errors import InputError
from silotune.lab.report.entries import read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.html_page import list_caveats, write_report
from silotune.lab.report.judging import verdicts
from silotune.lab.report.table_files import as_latex, as_markdown, comparison_frame, write_tables
from silotune.lab.report.tables import score_table
from tests.support.report_runs import curve, write_run


def entries(runs: Path, *methods: str):
    by_label = {entry.label: entry for entry in read_entries([runs])}
    return [by_label[method] for method in methods]


def test_runs_that_differ_in_the_seed_alone_are_one_row(runs: Path, tmp_path: Path) -> None:
    seeds = {entry.label: [run.seed for run in entry.runs] for entry in read_entries([runs])}
    assert seeds == {"local": [1, 2, 3], "fedmcp": [1, 2, 3], "fedavg-full": [1, 2, 3]}
    more = [write_run(tmp_path / f"m{mu}", "moon", 1, {"east": 1.0}, more={"method": {"name": "moon", "mu": mu}})
            for mu in (1, 5)]  # fmt: skip
    assert {entry.label for entry in read_entries(more)} == {"moon (mu=1)", "moon (mu=5)"}
    # a folder given twice, and once with its neighbors, counts once
    assert len(read_entries([runs / "alone-1", runs, runs / "alone-1"])[0].runs) == 3


def test_the_csv_by_hand(runs: Path, tmp_path: Path) -> None:
    found = entries(runs, "local", "fedmcp")
    text = (write_tables(Results(found), tmp_path)[0]).read_text(encoding="utf-8")
    rows = {(row["method"], row["silo"]): row for row in csv.DictReader(io.StringIO(text))}
    assert list(rows.values()) == comparison_frame(Results(found)).to_dict("records")
    assert text.splitlines()[0] == "method,silo,metric,mean,std,n,trainable_percent,sent_percent,bytes_up"
    # east: 72, 74, 76; west: 70, 69, 68; averages: 71, 71.5, 72
    expected = {"east": (74, 2), "west": (69, 1), "average": (71.5, 0.5)}
    for silo, (mean, std) in expected.items():
        row = rows["fedmcp", silo]
        assert (float(row["mean"]), float(row["std"]), row["n"]) == (mean, std, "3")
        assert row["bytes_up"] == str(3 * 2 * 2**20)
        assert row["sent_percent"] == ""  # that backbone is nowhere: no share of it
    population = comparison_frame(Results(entries(runs, "fedmcp"), 0))
    deviations = [float(std) for std in population["std"]]
    assert deviations == pytest.approx([np.std([72, 74, 76]), np.std([70, 69, 68]), np.std([71, 71.5, 72])], abs=1e-6)


def test_the_success_rate_of_an_attack_by_hand(tmp_path: Path) -> None:
    for seed, (overall, north) in enumerate([(40.0, 30.0), (50.0, 50.0)], 1):
        folder = write_run(tmp_path / f"attacked-{seed}", "fedprompt", seed, {"north": 80.0, "south": 60.0})
        summary = json.loads((folder / "summary.json").read_text())
        summary["attack"] = {"accuracy": 70.0, "asr": overall}
        summary["silos"]["north"]["asr"] = north
        (folder / "summary.json").write_text(json.dumps(summary))
    write_run(tmp_path / "plain-1", "local", 1, {"north": 70.0, "south": 70.0})
    entries = read_entries(sorted(tmp_path.iterdir()))
    rows = comparison_frame(Results(entries)).to_dict("records")
    rates = {(row["method"], row["silo"]): (row["asr_mean"], row["asr_std"]) for row in rows}
    assert rates["fedprompt", "north"] == ("40", f"{200**0.5:.6f}")
    assert rates["fedprompt", "average"] == ("45", f"{50**0.5:.6f}")
    assert rates["fedprompt", "south"] == rates["local", "average"] == ("", "")
    grid = score_table(Results(entries))
    assert grid.header[-2:] == ["average", "ASR"]
    assert [values[-1].text for _, values in grid.rows] == ["45.00 ± 7.07", "–"]


def test_one_seed_has_no_standard_deviation(runs: Path) -> None:
    one = read_entries([runs / "alone-1"])
    assert {*comparison_frame(Results(one))["std"]} == {""}
    assert {*comparison_frame(Results(one, 0))["std"]} == {"0"}


def test_best_and_second_are_marked(runs: Path) -> None:
    grid = score_table(Results(entries(runs, "local", "fedmcp", "fedavg-full")))
    assert grid.header == ["east", "west", "average"]
    assert {label: [value.rank for value in values] for label, values in grid.rows} == {
        "local": [0, 0, 0],
        "fedmcp": [1, 1, 1],
        "fedavg-full": [2, 2, 2],
    }
    lines = as_markdown(grid).splitlines()
    assert lines[3] == "| fedmcp | **74.00 ± 2.00** | **69.00 ± 1.00** | **71.50 ± 0.50** |"
    assert "<u>70.50 ± 0.00</u>" in lines[4]
    tex = as_latex(grid)
    assert r"fedmcp & \textbf{74.00 $\pm$ 2.00} & " in tex
    assert r"\underline{70.50 $\pm$ 0.00}" in tex


def test_latex_special_characters_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", "fedavg", 1, {"a_b": 1.0})
    assert r"a\_b" in as_latex(score_table(Results(read_entries([run]))))


def test_silos_judged_on_the_same_rows_are_no_repetitions(tmp_path: Path) -> None:
    """Four silos and three seeds of one partitioned data set: one column, one curve."""
    for seed in (1, 2, 3):
        for method, score in {"fedavg": 60.0 + seed, "fedprox": 50.0 + 2 * seed}.items():
            tests = dict.fromkeys(("a", "b", "c", "d"), score)
            write_run(tmp_path / f"{method}-{seed}", method, seed, tests, central=True)
    entries = read_entries([tmp_path])
    grid = score_table(Results(entries))
    assert (grid.header, [values[0].text for _, values in grid.rows]) == (["average"], ["62.00 ± 1.00", "54.00 ± 2.00"])
    assert len(comparison_frame(Results(entries))) == 2 * 5  # a row for every silo all the same
    assert curve(entries[0], "validation")["mean"] == pytest.approx([62 - 10, 62 - 5, 62 - 10 / 3])
    assert not curve(entries[0], "validation", "a")["x"]


def test_personal_models_on_the_same_rows_keep_their_columns(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", "fedper", 1, {"a": 50.0, "b": 60.0}, central=True)
    assert score_table(Results(read_entries([run]))).header == ["a", "b", "average"]


def test_scores_on_other_data_are_no_pairs(tmp_path: Path) -> None:
    """A comparison over tasks: only runs on the same test rows are judged against one another."""
    data = {"sst": {"tasks": ["SST-2"]}, "sst-less": {"tasks": ["SST-2"], "train_rows": 9}, "rte": {"tasks": ["RTE"]}}
    for number, (name, of) in enumerate(data.items()):
        write_run(tmp_path / name, "fedavg", 1, {"a": 50.0 - number}, central=True, more={"data": of})
    (verdict,) = verdicts(Results(read_entries([tmp_path])))
    assert "train_rows=9" in verdict.entry


def test_curves_by_hand(runs: Path) -> None:
    (entry,) = entries(runs, "fedmcp")
    east = curve(entry, "validation", "east")
    assert east["x"] == [1, 2, 3]
    assert east["mean"] == pytest.approx([74 - 10, 74 - 5, 74 - 10 / 3])
    assert east["std"] == pytest.approx([2, 2, 2])
    assert curve(entry, "validation")["mean"] == pytest.approx([71.5 - 10, 71.5 - 5, 71.5 - 10 / 3])
    assert curve(entry, "mib")["mean"] == [4, 8, 12]  # 1 MiB both ways for two silos
    assert Results([entry]).sent_by_silo(entry.label) == {"east": pytest.approx(3), "west": pytest.approx(3)}
    assert curve(entry, "validation", "nobody")["x"] == []


def test_final_phases_and_the_coordinator_count(tmp_path: Path) -> None:
    """One silo, three rounds: 2 s and 1 MiB each way in a round; then a broadcast of 3 MiB and 4 s of training."""
    final = {"event": "final", "round": 3, "silo": "east", "bytes_down": 3 * 2**20, "seconds": 4}
    server = [{"event": "server", "round": number, "seconds": 1.5} for number in (1, 2, 3)]
    run = write_run(tmp_path / "r", "fedfame", 1, {"east": 50.0}, extra=[final, *server])
    (entry,) = read_entries([run])
    assert curve(entry, "mib")["mean"] == [2, 4, 9]
    assert Results([entry]).seconds(entry) == (3 * 2 + 4 + 3 * 1.5, 3 * 7 - (3 * 2 + 4 + 3 * 1.5))


def test_what_a_reader_is_warned_of(tmp_path: Path, runs: Path) -> None:
    refused = {"event": "refused", "round": 2, "silo": "east", "reason": "tensor 'x' holds NaN or infinity"}
    run = write_run(tmp_path / "r", "fedavg", 7, {"east": 50.0, "west": 1.0}, extra=[refused, refused])
    caveats = "\n".join(list_caveats(Results(read_entries([run, runs]))))
    assert "r (seed 7): 2 updates were refused; the first in round 2 from east: tensor 'x' holds NaN" in caveats
    assert "One seed only, so no standard deviation: fedavg" in caveats
    assert "different seeds" in caveats
    assert not any("refused" in text for text in list_caveats(Results(read_entries([runs]))))


def test_without_validation_rows_the_last_round_was_not_chosen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", "fedavg", 7, {"east": 50.0, "west": 1.0})
    summary = json.loads((run / "summary.json").read_text())
    for unvalidated, wanted in (
        (["west"], "west: the best round is chosen without them"),
        (["east"], "last round counts"),
    ):
        for silo in unvalidated:
            summary["silos"][silo]["validation"] = None
        (run / "summary.json").write_text(json.dumps(summary | {"best_round": summary["rounds"]}))
        caveats = list_caveats(Results(read_entries([run])))
        assert any(text.endswith(wanted) for text in caveats)
        assert any("more rounds may help" in text for text in caveats) is (unvalidated == ["west"])


def test_who_never_trained(tmp_path: Path) -> None:
    """Silos that were never sampled may train at the end all the same (FedLoRA, FedDPA-F)."""
    scores, others = {"east": 50.0, "west": 1.0, "north": 2.0}, ("west", "north")
    run = write_run(tmp_path / "r", "fedlora", 7, scores, extra=[{"event": "final", "round": 3, "silo": "west"}])
    lines = (run / "events.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["event"] != "silo" or json.loads(line)["silo"] not in others]
    (run / "events.jsonl").write_text("".join(f"{line}\n" for line in kept))
    caveats = list_caveats(Results(read_entries([run])))
    assert any(text.endswith("never sampled, so never trained: north") for text in caveats)


def test_a_damaged_folder_and_an_unfinished_run_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", "fedavg", 1, {"a": 1.0})
    for damage in ("summary.json", "config.yaml"):
        whole = (run / damage).read_text()
        (run / damage).write_text("{ [")
        with pytest.raises(InputError, match=str(run)):
            read_entries([run])
        (run / damage).write_text(whole)
    (run / "summary.json").unlink()
    with pytest.raises(InputError, match="not finished"):
        read_entries([run])


@pytest.mark.usefixtures("no_figure_files")
def test_silos_that_keep_their_scores_to_themselves(tmp_path: Path) -> None:
    """On other machines a silo may not tell its test score; tables have a dash there and nothing breaks."""
    for method, seed in (("local", 1), ("fedmcp", 1)):
        folder = write_run(tmp_path / f"{method}-{seed}", method, seed, {"north": 80.0, "south": 60.0})
        summary = json.loads((folder / "summary.json").read_text())
        summary["silos"]["south"]["test"] = summary["silos"]["south"]["validation"] = None
        summary["average"] = 80.0 if method == "local" else None
        (folder / "summary.json").write_text(json.dumps(summary))
    entries = read_entries([tmp_path / "fedmcp-1", tmp_path / "local-1"])
    grid = score_table(Results(entries))
    shown = {label: dict(zip(grid.header, [v.text for v in values], strict=True)) for label, values in grid.rows}
    assert shown["fedmcp"]["average"] == "–"
    assert shown["local"]["average"] == "80.00"
    assert shown["local"].get("south", "–") == "–"
    page = write_report(Results(entries), tmp_path / "report.html").read_text(encoding="utf-8")
    assert "80.00" in page
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(result_table([run.summary for entry in entries for run in entry.runs]))
    assert "–" in console.export_text()
