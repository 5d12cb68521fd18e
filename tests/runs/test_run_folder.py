"""`silotune run` never writes over what is there: code 2, one line, and not a byte changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from silotune.core.files import LOCK_FILE
from silotune.errors import InputError
from tests.support.method_cases import same, snapshot


@pytest.fixture
def run_words(federate):
    return lambda case, *more: ["run", "demo", *federate.words(case, "rounds=1", "train.steps=1", *more)]


@pytest.mark.parametrize("name", ["run.log", ".hidden", "checkpoints/round-0001.json", "config.yaml"])
def test_a_folder_that_holds_anything_is_refused_and_left_alone(silotune, run_words, name, tmp_path):
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    before = snapshot(out)
    silotune(*run_words("fedmcp"), "--out", out).refusal(str(out), "--resume")
    assert snapshot(out) == before


def test_an_empty_folder_and_a_new_one_deep_down_are_fine(silotune, run_words, tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        assert silotune(*run_words("local"), "--out", out).code == 0
        assert (out / "summary.json").is_file()


@pytest.mark.parametrize("more", [(), ("cohort=auto",)])
def test_resume_from_a_damaged_checkpoint_is_refused_and_changes_nothing(silotune, federate, run_words, more, tmp_path):
    """Not even the log, by other versions of libraries or by how many silos train together."""
    out = tmp_path / "out"

    def interrupt(number: int, what: str, done: int, total: int) -> None:
        if (number, done) == (2, 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federate.run("fedmcp", out, "train.steps=1", *more, progress=interrupt)
    versions = json.loads((out / "versions.json").read_text())
    (out / "versions.json").write_text(json.dumps(versions | {"torch": "1.0"}))
    path = out / "checkpoints" / "silos" / "beta" / "0001.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    before = snapshot(out)
    silotune(*run_words("fedmcp", "rounds=2", *more), "--out", out, "--resume").refusal(path.name)
    assert snapshot(out) == before


def test_versions_say_what_a_run_was_made_on_and_of_which_rows(silotune, run_words, tmp_path):
    for number in (1, 2):
        assert silotune(*run_words("local"), "--out", tmp_path / f"{number}").code == 0
    assert silotune(*run_words("local", "data.seed=6"), "--out", tmp_path / "3").code == 0
    one, same_rows, other = (json.loads((tmp_path / f"{n}" / "versions.json").read_text()) for n in (1, 2, 3))
    assert one == same_rows
    assert one["packages"]["numpy"] == one["numpy"]
    assert one["processor"]
    rows = one["rows"]
    assert rows.keys() == json.loads((tmp_path / "1" / "summary.json").read_text())["silos"].keys()
    digests = [digest for of_silo in rows.values() for digest in of_silo.values()]
    assert len({*digests}) == len(digests) == 3 * len(rows)
    assert all(other["rows"][name] != of_silo for name, of_silo in rows.items())
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        assert one["commit"].startswith(head.stdout.strip())


def test_a_silo_may_be_named_like_a_file_of_a_checkpoint(silotune, run_words, silos_folder, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    names = ["reviews.json", "a.safetensors", "shared-0001", "two words", "x.tmp"]
    for name in names:
        shutil.copytree(silos_folder / "unlike" / "beta", data / name)
    words = run_words("fedmcp", f"data.path={data}", f"data.tasks={json.dumps(names)}", "rounds=3")
    for more in ((), ("--resume",)):
        outcome = silotune(*words, "--out", out, *more)
        assert (outcome.code, outcome.err) == (0, "")
        assert json.loads((out / "summary.json").read_text())["silos"].keys() == {*names}
        (out / "summary.json").unlink()


def test_a_file_that_another_tidies_up_meanwhile_is_no_error(federate, monkeypatch, tmp_path):
    """Silos of a federation on this machine drop their own old states, which a checkpoint drops as well."""
    unlink, gone = Path.unlink, []

    def dropped_just_before(path, missing_ok=False):
        if path.name == "0001.safetensors" and path.is_file():
            gone.append(path)
            unlink(path)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", dropped_just_before)
    finished = federate.run("local", tmp_path / "out", "rounds=3", "train.steps=1")
    assert gone
    assert finished.summary["rounds"] == 3


# -- one process at a time ---------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from silotune.core.files import folder_lock
with folder_lock(Path(sys.argv[1])):
    print("claimed", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def held():
    """`held(folder)` → a process that works in it."""
    started = []

    def hold(folder):
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "claimed\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.wait()


def test_a_folder_in_which_another_process_works_is_refused_until_that_ends(silotune, run_words, held, tmp_path):
    out = tmp_path / "out"
    words = (*run_words("local"), "--out", out)
    assert silotune(*words).code == 0
    (out / "summary.json").unlink()
    process = held(out)
    before = snapshot(out)
    line = silotune(*words, "--resume").refusal()
    assert line.endswith(f"{out}: another process is at work there; wait for it, or end it")
    assert snapshot(out) == before
    process.kill()  # nothing of it has to be tidied up
    process.wait()
    assert silotune(*words, "--resume").code == 0
    assert not (out / LOCK_FILE).exists()


def test_a_folder_claimed_before_anything_was_made_is_made_later(silotune, run_words, held, tmp_path):
    out = tmp_path / "out"
    held(out).kill()
    assert silotune(*run_words("local"), "--out", out).code == 2  # it holds something
    assert silotune(*run_words("local"), "--out", out, "--resume").code == 0


def test_a_second_run_of_the_same_process_is_refused_and_the_first_goes_on(federate, tmp_path):
    """As two notebooks of one kernel would have it."""
    out, refused = tmp_path / "out", []

    def progress(number: int, what: str, done: int, total: int) -> None:
        if (number, done) == (2, 1):
            with pytest.raises(InputError, match="another process is at work there"):
                federate.run("fedmcp", out, "train.steps=1", resume=True)
            refused.append(number)

    finished = federate.run("fedmcp", out, "train.steps=1", progress=progress)
    assert refused == [2]
    assert same(finished.summary) == same(federate.run("fedmcp", tmp_path / "whole", "train.steps=1").summary)


def test_a_comparison_leaves_a_cell_alone_in_which_another_works(silotune, run_words, held, tmp_path):
    words = [word for word in run_words("fedmcp")[1:] if not word.startswith("method=")]
    words = ["compare", *words, "methods=local", "seeds=1", "--out", tmp_path / "table"]
    held(tmp_path / "table" / "local-1").kill()
    held(tmp_path / "table" / "local-1")
    silotune(*words, "--resume").refusal("local-1: another process is at work there")
