"""A federation goes on from its last run; a silo leaves withdrawn rows out, and knows what they trained."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from silotune.core.records import check_audit
from silotune.core.serialization import read_tensors
from silotune.core.tensors import digest
from silotune.deploy.dossier import write_dossier
from silotune.deploy.printing import incidents
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.job import RunRegistry
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.session import Session
from silotune.distributed.silo.silo_config import REHEARSAL, PolicyConfig, RowBudget, read_silo_settings
from silotune.distributed.silo.store import SiloStore
from silotune.errors import InputError
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from tests.support.command_line import Silotune
from tests.support.method_cases import logged
from tests.support.session_rig import DirectLink, answering, coordinated, job, local_configs

SHORT = ("rounds=1", "train.steps=2")


def one_run(config, configs, out: Path) -> dict:
    """Run a federation whose silos have folders of their own; returns its summary."""
    coordinated(config, out, configs, local=False)
    return read_summary(out)


def test_two_runs_end_as_they_do_in_one_process(tiny_config, tmp_path: Path) -> None:
    first, second = tiny_config("fedmcp", *SHORT), tiny_config("fedmcp", *SHORT, f"start={tmp_path / 'one'}")
    configs = local_configs(first, tmp_path / "silos")
    one_run(first, configs, tmp_path / "one")
    federated = one_run(second, configs, tmp_path / "two")
    run(first, out=tmp_path / "here", progress=False)
    here = run(tiny_config("fedmcp", *SHORT, f"start={tmp_path / 'here'}"), out=tmp_path / "then", progress=False)
    assert federated["shared_sha256"] == here.summary["shared_sha256"]
    for name, own in configs.items():
        folders = sorted(Path(own.folder).glob(f"*/models/{name}"), key=lambda path: path.stat().st_mtime)
        kept = [
            read_tensors((path / "model.safetensors").read_bytes())
            for path in (folders[-1], tmp_path / "then" / "models" / name)
        ]
        assert digest(kept[0]) == digest(kept[1])

    (tmp_path / "two" / "models").rename(tmp_path / "gone")  # as in a run that did not reach its end
    with pytest.raises(InputError, match=r"start: \S+two is a run that has not finished, and holds no models yet"):
        one_run(second.replace(start=str(tmp_path / "two")), configs, tmp_path / "early")
    (tmp_path / "gone").rename(tmp_path / "two" / "models")

    third = tiny_config("fedmcp", *SHORT, f"start={tmp_path / 'two'}")
    configs["alpha"] = configs["alpha"].model_copy(update={"folder": str(tmp_path / "new")})
    one_run(third, configs, tmp_path / "three")
    notes = {
        event["silo"] for event in logged(tmp_path / "three", "silo") if "begin untrained" in event.get("note", "")
    }
    assert notes == {"alpha"}


def test_another_methods_run_is_refused_before_any_silo_is_asked(tiny_config, tmp_path: Path) -> None:
    first, second = tiny_config("fedmcp", *SHORT), tiny_config("fedavg", *SHORT, f"start={tmp_path / 'one'}")
    configs = local_configs(first, tmp_path / "silos")
    one_run(first, configs, tmp_path / "one")
    link = DirectLink(answering(configs))
    with pytest.raises(InputError, match=r"start: .* was trained with method=fedmcp, which has no shared part"):
        coordinate(job(second, tmp_path / "two", configs, local=False), link)
    assert link.sent == []


def test_withdrawn_rows(tiny_config, small_backbone, tmp_path: Path, silotune: Silotune) -> None:
    rows = [
        (f"the garden number {number} was {'good' if number % 2 else 'bad'}", str(number % 2)) for number in range(40)
    ]

    def write(path: Path, rows, header=("text", "label")) -> Path:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *rows])
        return path

    tree = {
        "name": "north",
        "folder": "state",
        "data": {"path": str(write(tmp_path / "rows.csv", rows)), "task": "mood"},
        "share": ["rows", "test"],
        "backbone": str(small_backbone),
        "policy": dict(REHEARSAL),
        "socket": "/tmp/unused.sock",
    }
    own = tmp_path / "silo.yaml"
    own.write_text(yaml.safe_dump(tree | {"approval": "policy"}), encoding="utf-8")
    answer = Session(read_silo_settings(own)).answer

    def federate(out: Path, *words: str) -> dict:
        config = tiny_config("fedmcp", *SHORT, *words)
        coordinate(job(config, out, ["north"], local=False), DirectLink({0: answer}))
        return read_summary(out)

    federate(tmp_path / "one")
    trained = json.loads(silotune("silo", "rows", "--config", own, "--json").out)["runs"]
    (first,) = trained
    assert (first["train"], first["validation"], first["test"], first["before"]) == (24, 8, 8, 0)

    gone = write(tmp_path / "gone.csv", [[rows[number][0].upper() + " "] for number in range(20)], ("text",))
    told = silotune("silo", "rows", "--config", own, "--withdrawn", gone)
    assert (told.code, told.err) == (0, "")
    assert told.out.startswith("20 rows are left out of all runs that begin from now on\nrun ")
    assert first["run"] in told.out
    assert str(tmp_path / "state" / first["run"] / "models" / "north") in told.out
    assert "not undone: models trained before keep what they learned" in told.out.replace("\n", " ")

    counts = federate(tmp_path / "two", f"start={tmp_path / 'one'}")["silos"]["north"]["rows"]
    assert sum(counts.values()) == 20
    after = json.loads(silotune("silo", "rows", "--config", own, "--withdrawn", gone, "--json").out)["runs"]
    second = next(run for run in after if run["run"] != first["run"])
    assert second["train"] == second["validation"] == second["test"] == 0 < second["before"] <= 20

    write(tmp_path / "rows.csv", rows + [(f"a new garden {number}", str(number % 2)) for number in range(20)])
    federate(tmp_path / "three", f"start={tmp_path / 'two'}")  # other splits: rows that trained are scored
    notes = [[event.get("note") for event in logged(tmp_path / out, "silo")] for out in ("one", "two", "three")]
    assert notes == [[None], [None], [f"scores rows that trained run {second['run']}"]]
    unknown = write(tmp_path / "unknown.csv", [[rows[0][0]], ["nobody wrote this"]], ("text",))
    told = silotune("silo", "rows", "--config", own, "--withdrawn", unknown)
    assert f"1 of them are not in {tmp_path / 'rows.csv'} now" in told.out.replace("\n", " ")
    counted = json.loads(silotune("silo", "rows", "--config", own, "--withdrawn", unknown, "--json").out)
    assert (counted["withdrawn"], counted["not_in_file"]) == (2, 1)
    (tmp_path / "rows.csv").rename(tmp_path / "elsewhere.csv")
    told = silotune("silo", "rows", "--config", own, "--withdrawn", unknown, "--json")
    assert (told.code, json.loads(told.out)) == (2, counted | {"not_in_file": None}), "the runs are told all the same"
    noted = [entry for entry in check_audit(tmp_path / "state")[0] if entry["kind"] == "withdrawn"]
    assert ("rows" in noted[0], noted[0]["reason"]) == (False, "20 rows")
    assert all(rows[0][0].encode() not in path.read_bytes() for path in (tmp_path / "state").glob("records.db*"))
    assert check_audit(tmp_path / "state")[1] == []


def test_a_run_without_rounds_scores_a_given_model_at_each_silo(tiny_config, tmp_path: Path) -> None:
    """The scores are those of the model's last round, nothing is trained, and `share` and policies hold."""
    first = tiny_config("fedmcp", *SHORT)
    configs = local_configs(first, tmp_path / "silos")
    trained = one_run(first, configs, tmp_path / "one")
    scoring = tiny_config("fedmcp", "rounds=0", f"start={tmp_path / 'one'}")
    configs["gamma"] = configs["gamma"].replace(share=["validation"])
    link = coordinated(scoring, tmp_path / "two", configs, local=False)
    scored = read_summary(tmp_path / "two")
    assert {decode(data).kind for _, data in link.sent} == {"hello", "score"}
    for name in ("alpha", "beta"):
        assert {key: scored["silos"][name][key] for key in ("validation", "test", "rows")} == {
            key: trained["silos"][name][key] for key in ("validation", "test", "rows")
        }
    assert (scored["silos"]["gamma"]["test"], scored["best_round"], scored["bytes_up"]) == (None, 0, 0)
    assert scored["shared_sha256"] == trained["shared_sha256"]
    for own in configs.values():
        records = SiloStore(Path(own.folder)).records
        uses: dict[str, set[str]] = {}
        for run_id, split in records.rows("SELECT DISTINCT run, split FROM used"):
            uses.setdefault(run_id, set()).add(split)
        assert sorted(map(sorted, uses.values())) == [["before", "test", "validation"], ["test", "train", "validation"]]
    for own in configs.values():  # other splits, as another seed makes them
        files = [Path(own.rows) / f"{name}.jsonl" for name in ("train", "test")]
        contents = [file.read_bytes() for file in files]
        for file, content in zip(files, reversed(contents), strict=True):
            file.write_bytes(content)
    coordinated(scoring, tmp_path / "other", configs, local=False)
    run_before = RunRegistry.open(tmp_path / "one").run
    said = f"scores rows that trained run {run_before}"
    assert incidents(tmp_path / "other") == [f"silo {name!r}: {said}" for name in configs]
    assert incidents(tmp_path / "two") == []
    (tmp_path / "about.yaml").write_text("purpose: to try\nparties: us\n")
    write_dossier(tmp_path / "other", tmp_path / "d.md", tmp_path / "about.yaml")
    told = (tmp_path / "d.md").read_text()
    assert f"| Begins with | the model of {tmp_path / 'one'} (run {run_before}): what" in told
    assert f"\n* silo 'alpha': {said}\n" in told
    fresh = configs | {"alpha": configs["alpha"].replace(folder=str(tmp_path / "new"))}
    with pytest.raises(InputError, match=r"'alpha': start: has no model of run \w+ that rounds=0 could score"):
        coordinated(scoring, tmp_path / "three", fresh, local=False)
    private = configs["alpha"].replace(policy=PolicyConfig(preset="private"), privacy=RowBudget(epsilon=8.0))
    closed = configs | {"alpha": private}
    with pytest.raises(InputError, match=r"'alpha': its policy is private: no score of its rows leaves \(rounds=0\)"):
        coordinated(scoring, tmp_path / "four", closed, local=False)
    with pytest.raises(InputError, match=r"rounds=0: .* head=mlp has tensors .* allowed: start=RUN"):
        coordinated(tiny_config("fedmcp", "rounds=0"), tmp_path / "five", configs, local=False)
