"""What a federation shows: `status`, the metrics of both parties, and the dashboard and alerts made of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from silotune.deploy import status as observed
from silotune.deploy.printing import print_status
from silotune.deploy.queue import RunQueue
from silotune.deploy.settings import CoordinatorSettings
from silotune.deploy.status import FederationMetrics
from silotune.distributed.coordinator.run_status import RunStatus, read_status
from silotune.distributed.flower.commands import free_ports
from silotune.distributed.metrics import LINK_FILE, LinkState, serve_metrics
from silotune.distributed.protocol.disclosure import SiloStatus
from silotune.distributed.protocol.frames import Frame
from silotune.distributed.silo.policy import Request
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.store import Price, SiloAnswer, SiloStore
from silotune.distributed.silo.worker import WorkerMetrics
from silotune.errors import InputError
from silotune.version import __version__
from tests.support.session_rig import ALL, coordinated, local_configs

DEPLOY = Path(__file__).parents[2] / "deploy"
EVIL = "<script>alert(1)</script>"
STATUS = {"rows_fingerprint": "ab" * 16, "epsilon_left": 3.5, "disk_free_bytes": 2**33}


def hello(silo: str, **more: object) -> Frame:
    return Frame("hello", {"silo": silo, "identity": {"version": "1.2", "protocol": 1}, **more})


@pytest.fixture
def running(tmp_path, monkeypatch) -> CoordinatorSettings:
    """A coordinator whose run 1 is in round 2 of 3, while run 2 waits; north works, south's operator has to decide."""
    settings = CoordinatorSettings(folder=str(tmp_path / "link"), insecure=True)
    queue = RunQueue(Path(settings.folder))
    for name in ("one", "two"):
        (tmp_path / name / "federation").mkdir(parents=True)
        queue.add(tmp_path / name, "fedmcp", 3, ("north", "south", EVIL))
    queue.change(1, state="running", began="2026-01-02T03:04:05.000+00:00")
    board = RunStatus.begin(tmp_path / "one" / "federation")
    board.report(2, "north, south", 0, 2)
    for silo, more in (("north", {"status": STATUS}), ("south", {})):
        board.sent(silo, "hello", 99)
        board.received(silo, hello(silo, **more), 100)
    board.sent("north", "round", 99)
    board.received("south", Frame("waiting", {"silo": "south"}), 50)
    board.write(at_once=True)
    events = [
        {"event": "silo", "round": 1, "silo": "north", "loss": 0.7},
        {"event": "silo", "round": 1, "silo": "south", "loss": 0.9},
        {
            "event": "round",
            "round": 1,
            "silos": ["north"],
            "validation": {"north": 61.5, "south": None},
            "seconds": 75.2,
        },
        {"event": "silo", "round": 2, "silo": "north", "loss": 0.5},
        {"event": "silo-failed", "round": 1, "silo": "south", "reason": f"{EVIL} & more"},
        {"event": "refused", "round": 1, "silo": "south", "reason": "NaN"},
        {"event": "silo-failed", "round": 1, "silo": f"node 7 {EVIL}", "reason": "not a silo of this run"},
    ]
    (tmp_path / "one" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    monkeypatch.setattr(observed, "is_locked", lambda _folder: True)
    return settings


def nodes(_settings: CoordinatorSettings) -> dict[str, str]:
    return {"north": "online", "south": "offline"}


def page(measures) -> str:
    """What Prometheus reads."""
    (port,) = free_ports(1)
    serve_metrics(port, measures)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
        return reply.read().decode()


def values(text: str) -> dict[str, float]:
    """Samples of Prometheus's format: name{labels} → value."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {f"{s.name}{sorted(s.labels.items()) if s.labels else ''}": s.value for s in samples}


def test_what_is_known_is_told_and_the_rest_is_none(running):
    state = observed.federation_status(running, nodes)
    run = state["coordinator"]["run"]
    assert (run["run"], run["round"], run["finished_rounds"], state["coordinator"]["queue"]) == (1, 2, 0, [2])
    silos = {silo["silo"]: silo for silo in state["silos"]}
    north, south, unseen = (silos[name] for name in ("north", "south", EVIL))
    assert north["last_seen"] is not None
    assert {name: north[name] for name in STATUS} == STATUS
    assert (north["online"], north["version"], north["protocol"]) == (True, "1.2", 1)
    assert north["busy"].items() >= {"state": "working", "run": 1, "kind": "round", "round": 2}.items()
    assert (south["online"], south["busy"]) == (False, {"state": "waits for approval", "run": 1})
    assert {south[name] for name in STATUS} == {None}
    assert unseen == dict.fromkeys(unseen) | {"silo": EVIL, "online": False}


def test_who_has_not_approved_and_why_a_run_failed_is_named(running, tmp_path, capsys):
    queue = RunQueue(Path(running.folder))
    queue.add(tmp_path / "three", "fedavg", 1, ("north", "south"))
    queue.end(3, "failed", "below its quorum")
    (tmp_path / "three" / "federation").mkdir(parents=True)
    board = RunStatus.begin(tmp_path / "three" / "federation")
    board.received("north", Frame("failed", {"silo": "north", "reason": "OSError: no space is left on the disk"}), 9)
    board.received("south", Frame("answer", {"silo": "south"}), 9)
    board.end(InputError("below its quorum"))
    queue.change(1, state="waiting")  # it made room for run 2
    state = observed.federation_status(running, nodes)
    ((run, silos),) = ((each["run"], each["silos"]) for each in state["coordinator"]["waiting"])
    assert (run, silos.keys(), silos["south"][:2]) == (1, {"south"}, "20")
    print_status(state)
    said = capsys.readouterr().out
    assert "run 1 waits for approval: south since " in said
    assert "below its quorum\n  north: OSError: no space is left on the disk\n" in said


def test_nothing_is_invented_where_nothing_runs(running, monkeypatch):
    monkeypatch.setattr(observed, "is_locked", lambda _folder: False)
    RunQueue(Path(running.folder)).end(1, "finished")
    state = observed.federation_status(running, lambda _: pytest.fail("nobody to ask"))
    assert state["coordinator"]["running"] is False
    assert state["coordinator"]["run"] is None
    assert {(silo["online"], silo["busy"]) for silo in state["silos"]} == {(None, None)}


def test_status_as_json_and_as_a_table(silotune, tmp_path):
    file = tmp_path / "coordinator.yaml"
    file.write_text("folder: link\ninsecure: true\n")
    RunQueue(tmp_path / "link").add(tmp_path / "one", "fedmcp", 3, ("north",))
    state = json.loads(silotune("federation", "status", str(file), "--json").out)
    assert (state["coordinator"]["running"], state["coordinator"]["queue"]) == (False, [1])
    assert [(silo["silo"], silo["online"]) for silo in state["silos"]] == [("north", None)]
    table = silotune("federation", "status", str(file)).out
    assert "coordinator: not running" in table
    assert "not known" in table


def test_metrics_of_a_coordinator(running):
    text = page(FederationMetrics(running, nodes).measures)
    told = values(text)
    assert told["silotune_queue_length"] == 1
    assert told["silotune_round[('run', '1')]"] == 2
    assert 0 <= told["silotune_round_age_seconds[('run', '1')]"] < 600
    assert told["silotune_messages_total[('direction', 'down'), ('run', '1')]"] == 3
    assert told["silotune_bytes_total[('direction', 'up'), ('run', '1')]"] == 250
    assert told["silotune_silo_online[('silo', 'north')]"] == 1
    assert told["silotune_silos_online"] == 1
    assert told["silotune_silo_waits_for_approval[('silo', 'south')]"] == 1
    assert told["silotune_silo_failures_total[('kind', 'failure'), ('run', '1'), ('silo', 'south')]"] == 1
    assert told["silotune_silo_failures_total[('kind', 'refused'), ('run', '1'), ('silo', 'south')]"] == 1
    assert "node 7" not in text, "a stranger's words are no label"
    assert "more" not in text


def test_a_port_that_is_taken_is_named():
    (port,) = free_ports(1)
    serve_metrics(port, list)
    with pytest.raises(InputError, match=f"metrics_port: {port} cannot be used"):
        serve_metrics(port, list)
    serve_metrics(None, lambda: pytest.fail("nobody asks"))


def test_metrics_of_a_worker(tmp_path):
    settings = SiloSettings(
        name="north", folder=str(tmp_path), rows=str(tmp_path), share=[], policy="trusting", secret="key", epsilon=8.0
    )
    store = SiloStore(tmp_path)
    for number in (1, 2, 2):
        store.count(Request("r", "round", number, str(number), 40), ("configuration", "rows"), 1, 9)
    store.commit("r", SiloAnswer(Frame("answer"), price=Price("m", 1.5, 0.0)), {})
    metrics = WorkerMetrics(settings)
    metrics.count("round", Frame("answer", {}).encode(), 2.0)
    metrics.count(EVIL, Frame("refused", {"reason": "silo 'north': its policy refuses x; y"}).encode(), 0.5)
    metrics.count("score", Frame("refused", {"reason": "other"}).encode(), 0.0)
    text = page(metrics.measures)
    told = values(text)
    assert told["silotune_worker_requests_total[('kind', 'round'), ('outcome', 'answered')]"] == 1
    assert told["silotune_worker_requests_total[('kind', 'other'), ('outcome', 'refused by policy')]"] == 1
    assert told["silotune_worker_requests_total[('kind', 'score'), ('outcome', 'refused')]"] == 1
    assert told["silotune_worker_busy_seconds_total"] == 2.5
    assert (told["silotune_worker_run_numbers"], told["silotune_worker_epsilon_sum"]) == (80, 1.5)
    assert told["silotune_worker_epsilon_budget"] == 8
    assert EVIL not in text


@pytest.mark.parametrize(
    "sent",
    [None, "x", [], 3, {"rows_fingerprint": EVIL}, *({"epsilon_left": value} for value in (-1, float("nan"), "0.5")),
     *({"disk_free_bytes": value} for value in (-1, True, 1.5, 10**400))],
)  # fmt: skip
def test_a_peer_without_status_is_no_problem(sent):
    assert SiloStatus.read(sent) is None
    assert SiloStatus.read(STATUS | {"more": 1}) == SiloStatus(**STATUS)


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_run_tells_of_its_silos_what_they_share(tiny_config, tmp_path, shared):
    config = tiny_config("fedmcp", "rounds=1")
    configs = local_configs(config, tmp_path / "silos", share=[*ALL, *(["status"] if shared else [])])
    coordinated(config, tmp_path / "run", configs, local=False)
    board = read_status(tmp_path / "run" / "federation")
    assert (board.state, board.round) == ("finished", 1)
    assert board.messages_down == board.messages_up > 3
    for entry in board.silos.values():
        assert (entry.version, entry.asked, entry.waits) == (__version__, None, False)
        assert entry.seen is not None
        assert (entry.status is not None) == shared
    if shared:
        told = [entry.status["rows_fingerprint"] for entry in board.silos.values()]
        assert len(set(told)) == len(told) == 3
        assert all(entry.status["disk_free_bytes"] > 0 for entry in board.silos.values())


def test_dashboard_and_alerts_name_metrics_that_exist(running, tmp_path):
    settings = SiloSettings(name="north", folder=str(tmp_path), rows=str(tmp_path), share=[], policy="trusting")
    (tmp_path / LINK_FILE).write_text(json.dumps(vars(LinkState("", "", 0, {}))))
    known = {measure.name.removeprefix("silotune_") + ("_total" if measure.type == "counter" else "") for party in (
        FederationMetrics(running, nodes), WorkerMetrics(settings)) for measure in party.measures()}  # fmt: skip
    alerts = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len(rules) == 8
    panels = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))["panels"]
    shown = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    for expression in (*(rule["expr"] for rule in rules), *shown):
        named = re.findall(r"silotune_(\w+)", expression)
        assert named, expression
        assert set(named) <= known, expression


def test_who_looks_at_a_federation_does_not_wait_for_torch():
    words = "import sys, silotune.deploy.status, silotune.deploy.processes; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
