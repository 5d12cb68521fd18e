"""A survey: silos count their rows before a run, as their own files and policies allow; nothing is trained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from silotune.config.data import SiloConfig
from silotune.core.records import check_audit
from silotune.deploy.printing import print_audit, print_survey
from silotune.distributed.protocol.disclosure import read_survey
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.approvals import Approvals
from silotune.distributed.silo.silo_config import PolicyConfig, RowBudget
from silotune.distributed.silo.store import SiloStore
from silotune.distributed.silo.survey import RowCounts
from silotune.errors import InputError
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from tests.support.session_rig import coordinated, local_configs

EVERY = ["units", "labels", "lengths", "cut", "duplicates", "dates"]
ASKED = ("rounds=0", f"survey.figures={','.join(EVERY)}", "survey.column=seen", "train.max_length=24")
NOISE = ("privacy.unit=patient", "privacy.epsilon=3")


@pytest.fixture
def silos(tiny_config, tmp_path):
    """`silos()` → three silos with tables of their own: 60 rows of 20 patients, one text in six twice."""

    def made(**more):
        configs = {}
        for name, settings in local_configs(tiny_config("fedavg"), tmp_path / "silos", survey=EVERY, **more).items():
            path = tmp_path / f"{name}.csv"
            shown = [number - (number % 6 == 5) for number in range(60)]
            lines = [f"{'a long text ' * (number % 3 * 4 + 1)}{number}," for number in shown]
            ends = [
                f"{('good', 'bad')[number % 4 == 0]},p{number // 3},{2020 + number % 2}-05-01" for number in range(60)
            ]
            path.write_text("text,label,patient,seen\n" + "\n".join(map("".join, zip(lines, ends, strict=True))))
            data = SiloConfig(name=name, path=str(path), text="text", label="label", labels=["bad", "good"], task="one")
            configs[name] = settings.replace(rows=None, data=data)
        return configs

    return made


def test_counts_are_those_of_the_rows_and_small_ones_are_hidden(tiny_config, silos, tmp_path, capsys) -> None:
    config = tiny_config("fedavg", *ASKED)
    configs = silos()
    configs["gamma"] = configs["gamma"].replace(survey=["units"])
    link = coordinated(config, tmp_path / "run", configs, local=False)
    assert Counter(decode(data).kind for _, data in link.sent) == {"hello": 3, "survey": 3}
    survey = read_summary(tmp_path / "run")["survey"]
    alpha = survey["silos"]["alpha"]
    assert (alpha["units"], alpha["labels of one"], alpha["duplicates"]) == (
        {"in all": 60}, {"bad": 15, "good": 45}, {"in all": 10},
    )  # fmt: skip
    assert {year: count for year, count in alpha["dates"].items() if count != "< 10"} == {"2020": 30, "2021": 30}
    assert (sum(count for count in alpha["lengths"].values() if count != "< 10"), alpha["cut"]) == (60, {"in all": 40})
    assert (survey["all"]["units"], survey["all"]["labels of one"]["bad"]) == ({"in all": 180}, 30)
    assert survey["all"]["dates"]["1990"] == "0 to 18"
    assert survey["untold"] == {"gamma": EVERY[1:]}
    assert survey["warnings"][0] == "silo 'alpha': 60 units; its scores and its updates say little"
    assert survey["silos"]["gamma"] == {"units": {"in all": 60}}
    folder = Path(configs["alpha"].folder)
    entries, problems = check_audit(folder)
    told = [entry for entry in entries if entry["kind"] == "survey"]
    assert (problems, told[0]["survey"]["labels"], told[0]["numbers"]) == ([], [["bad", 15], ["good", 45]], 77)
    capsys.readouterr()
    print_survey(survey)
    print_audit(folder, False)
    shown = capsys.readouterr().out
    assert "labels (bad: 15, good: 45); lengths (up to 16: 20, up to 64: 30, up to 128: 10, all others: < 10)" in shown
    assert "dates (2020: 30, 2021: 30, all others: < 10)" in shown
    assert "silo 'gamma' does not tell: labels" in shown
    assert not list((tmp_path / "run").glob("models/*"))


def test_noise_is_on_what_a_patient_adds_and_is_charged_once(tiny_config, silos, tmp_path) -> None:
    config = tiny_config("fedavg", "rounds=0", "survey.figures=units,labels,duplicates", *NOISE)
    private = {
        "policy": PolicyConfig(preset="private", row_order="seed"),
        "privacy": RowBudget(unit="patient", epsilon=8.0, delta=1e-3),
        "seeded_noise": False,
        "approval": "ask",
    }
    configs = silos(**private)
    asked: list[str] = []

    def approve(folder: str) -> None:
        approvals = Approvals(Path(folder))
        for waiting in approvals.all():
            asked.extend(waiting.description)
            approvals.decide(waiting.name, "approved")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("silotune.distributed.coordinator.dispatcher.APPROVAL_INTERVAL", 0.0)
        require = Approvals.require

        def ask(self, *arguments):
            try:
                require(self, *arguments)
            finally:
                approve(self._records.folder)

        patch.setattr(Approvals, "require", ask)
        link = coordinated(config, tmp_path / "run", configs, local=False)
    assert "survey: how many rows this silo has, by units, labels; no row trains anything" in asked
    assert "asked, and stays here: duplicates" in asked
    assert any(
        line.startswith("noise: ") and "what a patient moves counts by; the run aims at ε = 3" in line for line in asked
    )
    surveys = [frame.fields["survey"] for frame in (decode(data) for _, data in link.came) if frame.kind == "survey"]
    assert all(survey.keys() == {"units", "labels"} for survey in surveys)
    for settings in configs.values():
        ledger = SiloStore(Path(settings.folder), budget=settings.privacy).ledger
        rows = ledger._records.rows("SELECT rate, steps FROM row_charges")
        assert rows == [(1.0, 1)]
        assert 0 < ledger.spent("patient") <= 8.0
    for change, words, reason in (
        ({}, (), "its policy is private; allowed: runs with privacy.unit=patient"),
        ({"survey": ["cut"]}, NOISE, "tells no units, labels; its silo config lets surveys ask for: cut"),
        ({"privacy": None, "policy": PolicyConfig(preset="trusting"), "epsilon": 1.0}, (), "answers with noise alone"),
    ):
        other = {name: settings.replace(**change) for name, settings in configs.items()}
        survey = tiny_config("fedavg", "rounds=0", "survey.figures=units,labels", *words)
        with pytest.raises(InputError, match=reason):
            coordinated(survey, tmp_path / f"refused {reason[:9]}", other, local=False)


def test_the_noise_has_the_deviation_that_was_charged() -> None:
    """Independently: it is the multiplier times √figures, and no unit moves the counts by more than that in L2 norm."""
    from silotune.communication.privacy.noise import NoiseStream

    units = torch.tensor([[1.0, 0.25, 0.75]]).repeat(400, 1)
    counts = RowCounts({"units": ["in all"], "labels": ["bad", "good"]}, units)
    told = [counts.told(5.0, NoiseStream(str(number).encode())) for number in range(300)]
    exact = (400, 100, 300)
    drawn = torch.tensor([[count for bins in one.values() for _, count in bins] for one in told], dtype=torch.float64)
    deviation = (drawn - torch.tensor(exact)).pow(2).mean().sqrt().item()
    assert deviation == pytest.approx(5 * 2**0.5, rel=0.1)
    assert units.norm(dim=1).max() <= 2**0.5


def test_what_is_no_survey(tiny_config, tmp_path) -> None:
    for words, reason in (
        (("survey.figures=units",), "give rounds=0"),
        (("rounds=0", "survey.figures=dates"), "is the column of survey.figures=dates"),
        (("rounds=0", "survey.figures=units", "aggregation.secure=true"), "give rounds=0 without secure"),
        (("rounds=0", "survey.figures=rows"), "survey.figures"),
    ):
        with pytest.raises(InputError, match=reason):
            tiny_config("fedavg", *words)
    with pytest.raises(InputError, match="silotune survey"):
        run(tiny_config("fedavg", "rounds=0", "survey.figures=units"), out=tmp_path / "run")
    for fields in (None, {"age": []}, *({"units": [["in all", count]]} for count in (3, 1e9, "many", True))):
        assert read_survey(fields) is None
    assert read_survey({"units": [["in all", "< 10"]]}) == {"units": [("in all", "< 10")]}
