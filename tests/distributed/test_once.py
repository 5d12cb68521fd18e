"""What is done once: a silo judges a round once, and one coordinator at a time has the run folder."""

from __future__ import annotations

import pytest

from silotune.config.coordinator import FederationConfig
from silotune.distributed.coordinator import coordinate as coordinator_module
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.job import prepare
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo import local_work
from silotune.distributed.silo.session import Session
from silotune.errors import InputError
from silotune.evaluation.federation_scores import score_silos, summary_entries
from silotune.runs.storage.readers import read_summary
from tests.support.method_cases import snapshot
from tests.support.session_rig import DirectLink, answering, federate, job, local_configs


def test_a_silo_judges_once_however_often_it_is_asked(tiny_config, tmp_path, monkeypatch):
    """Also after a restart of its worker; what its operator no longer shares is not taken from what it answered."""
    config = tiny_config("fedmcp", "rounds=2", "train.steps=1", "sampling.count=2")
    _, link = federate(config, tmp_path / "run")
    judged = []
    monkeypatch.setattr(local_work, "summary_entries", lambda *a: judged.append("test") or summary_entries(*a))
    monkeypatch.setattr(local_work, "score_silos", lambda *a: judged.append("validation") or score_silos(*a))
    requests = [data for node, data in link.sent if node == 0 and decode(data).kind == "score"]
    (last,) = [data for data in requests if decode(data).fields["splits"] == ["validation", "test"]]
    local = local_configs(config, tmp_path / "run")["alpha"]
    answered = {Session(local).answer(last) for _ in range(2)} | {data for node, data in link.came if node == 0}
    assert judged == []
    assert Session(local).answer(last) in answered
    assert decode(Session(local).answer(last)).fields["scores"]["test"] is not None
    quiet = Session(local.model_copy(update={"share": ["validation"]}))
    for _ in range(2):
        assert decode(quiet.answer(last)).fields["scores"].keys() == {"validation"}
    assert judged == ["validation", "test"]


@pytest.mark.parametrize("local", [True, False])
def test_a_second_coordinator_in_the_folder_is_refused_and_the_first_goes_on(whole, tmp_path, monkeypatch, local):
    monkeypatch.setattr(coordinator_module, "PREDECESSOR_TIMEOUT", 0.0)
    config, expected = whole("fedmcp")
    out, refused = tmp_path / "run", []
    configs = local_configs(config, out if local else tmp_path / "elsewhere")
    answers, task = answering(configs), job(config, out, configs, local)

    def second(data):
        if decode(data).kind == "round" and not refused:
            before = snapshot(out)
            named = config.model_copy(update={"federation": FederationConfig(silos=sorted(configs))})
            for begin in (lambda: coordinate(task, DirectLink({})), lambda: prepare(named, out, resume=True)):
                with pytest.raises(InputError) as error:
                    begin()
                refused.append(str(error.value))
            assert snapshot(out) == before
        return answers[0](data)

    coordinate(task, DirectLink(answers | {0: second}))
    folder = out / "federation" if local else out
    assert refused[0] == f"{folder}: another process is at work there; wait for it, or end it"
    assert len(refused) == 2
    assert read_summary(out)["shared_sha256"] == expected["shared_sha256"]
    assert not list(out.rglob(".lock"))
