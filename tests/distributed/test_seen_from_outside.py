"""What a federation shows: `status`, the metrics of both parties, the status page, and who may read them."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from silotune.deploy import federation_status as observed
from silotune.deploy.curves import curve_chart
from silotune.deploy.party_configs import CoordinatorSettings
from silotune.deploy.run_queue import RunQueue
from silotune.deploy.status_server import status_server
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.silo_board import SiloBoard, read_board
from silotune.distributed.processes.loopback_server import LoopbackServer, Page
from silotune.distributed.processes.ports import free_ports
from silotune.distributed.protocol.frames import Frame
from silotune.distributed.protocol.silo_status import SiloStatus
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.worker_metrics import WorkerMetrics
from silotune.errors import InputError
from silotune.version import __version__
from tests.support.session_rig import ALL, DirectLink, answering, job, local_configs

CHROMIUM = shutil.which("chromium")
EVIL = "<script>alert(1)</script>"
STATUS = {"rows_fingerprint": "ab" * 16, "epsilon_left": 3.5, "disk_free_bytes": 2**33}


def hello(silo: str, **more: object) -> Frame:
    return Frame("hello", {"silo": silo, "identity": {"version": "1.2", "protocol": 1}, **more})


@pytest.fixture
def running(tmp_path, monkeypatch) -> CoordinatorSettings:
    """A coordinator whose run 1 is in round 2 of 3, while run 2 waits; north works, south's operator has to decide."""
    settings = CoordinatorSettings(folder=str(tmp_path / "link"), insecure=True, metrics_port=free_ports(1)[0])
    queue = RunQueue(Path(settings.folder))
    for name in ("one", "two"):
        (tmp_path / name / "federation").mkdir(parents=True)
        queue.add(tmp_path / name, "fedmcp", 3, ("north", "south", EVIL))
    queue.change(1, state="running", began="2026-01-02T03:04:05.000+00:00")
    board = SiloBoard(tmp_path / "one" / "federation" / "silos.json")
    board.at_round(2)
    for silo, more in (("north", {"status": STATUS}), ("south", {})):
        board.sent(silo, Frame("hello").encode())
        board.received(silo, hello(silo, **more), 100)
    board.sent("north", Frame("round").encode())
    board.received("south", Frame("waiting", {"silo": "south"}), 50)
    board.write()
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
    monkeypatch.setattr(observed, "is_running", lambda _folder: True)
    return settings


def nodes(_settings: CoordinatorSettings) -> dict[str, str]:
    return {"north": "online", "south": "offline"}


def get(port: int, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{port}" if host is None else host)
    connection.endheaders()
    reply = connection.getresponse()
    return reply.status, dict(reply.getheaders()), reply.read().decode()


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


def test_nothing_is_invented_where_nothing_runs(running, monkeypatch):
    monkeypatch.setattr(observed, "is_running", lambda _folder: False)
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
    with status_server(running, print, nodes) as server:
        code, _, text = get(server.port, "/metrics")
    told = values(text)
    assert code == 200
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


def test_the_page_tells_the_run_and_escapes_what_others_say(running):
    with status_server(running, print, nodes) as server:
        code, headers, text = get(server.port)
    assert code == 200
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text
    assert {"Run 1: fedmcp, running", "Training loss by round", "waits for approval"} <= set(re.findall("|".join(
        ("Run 1: fedmcp, running", "Training loss by round", "waits for approval")), text))  # fmt: skip
    assert '<meta http-equiv="refresh"' in text
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?://", text), "nothing from elsewhere"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


@pytest.fixture
def server():
    served = LoopbackServer(0, {"/": lambda: Page(b"page"), "/broken": lambda: Page(bytes(1 // 0))})
    yield served
    served.close()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "", "127.0.0.1", "127.0.0.1:{port}.evil.example"]
)
def test_a_name_that_was_made_to_point_here_learns_nothing(server, host):
    assert get(server.port, host=host.format(port=server.port))[0::2] == (421, "only for 127.0.0.1 and localhost\n")


def test_only_reading_and_only_on_loopback(server):
    assert get(server.port, host=f"localhost:{server.port}")[0::2] == (200, "page")
    assert get(server.port, method="HEAD")[0::2] == (200, "")
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert get(server.port, method=method)[0] == 405, method
    assert get(server.port, "/../etc/passwd")[0] == 404
    code, _, text = get(server.port, "/broken")
    assert (code, text) == (500, "cannot be made now (see the log)\n")
    assert server._server.server_address[0] == "127.0.0.1"
    with pytest.raises(InputError, match=f"metrics_port: {server.port} cannot be used"):
        LoopbackServer(server.port, {})


def test_no_port_no_server(tmp_path):
    with status_server(CoordinatorSettings(folder=str(tmp_path), insecure=True), print) as server:
        assert server is None


def test_metrics_of_a_worker(tmp_path):
    port = free_ports(1)[0]
    settings = SiloSettings(
        name="north", folder=str(tmp_path), rows=str(tmp_path), share=[], secret="key", epsilon=8.0, metrics_port=port
    )
    lines = [{"run": "r", "kind": "round", "round": n, "request": f"{n}", "numbers": 40} for n in (1, 2, 2)]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    price = {"run": "r", "answer": "a", "mechanism": "m", "epsilon": 1.5, "delta": 0.0}
    (tmp_path / "released.jsonl").write_text(json.dumps(price) + "\n")
    metrics = WorkerMetrics(settings)
    metrics.count("round", Frame("answer", {}).encode(), 2.0)
    metrics.count(EVIL, Frame("refused", {"reason": "silo 'north': its policy refuses x; y"}).encode(), 0.5)
    metrics.count("score", Frame("refused", {"reason": "other"}).encode(), 0.0)
    server = metrics.serve()
    try:
        text = get(port, "/metrics")[2]
    finally:
        server.close()
    told = values(text)
    assert told["silotune_worker_requests_total[('kind', 'round'), ('outcome', 'answered')]"] == 1
    assert told["silotune_worker_requests_total[('kind', 'other'), ('outcome', 'refused by policy')]"] == 1
    assert told["silotune_worker_requests_total[('kind', 'score'), ('outcome', 'refused')]"] == 1
    assert told["silotune_worker_busy_seconds_total"] == 2.5
    assert (told["silotune_worker_run_numbers"], told["silotune_worker_epsilon_sum"]) == (80, 1.5)
    assert told["silotune_worker_epsilon_budget"] == 8
    assert EVIL not in text


@pytest.mark.parametrize("sent", [None, "x", [], 3])
def test_a_peer_without_status_is_no_problem(sent):
    assert SiloStatus.read(sent) is None


def test_values_of_another_form_are_dropped():
    sent = {"rows_fingerprint": EVIL, "epsilon_left": float("nan"), "disk_free_bytes": True, "more": 1}
    assert SiloStatus.read(sent) == SiloStatus()
    assert SiloStatus.read({"epsilon_left": -1, "disk_free_bytes": -1}) == SiloStatus()


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_run_tells_of_its_silos_what_they_share(tiny_config, tmp_path, shared):
    config = tiny_config("fedmcp", "rounds=1")
    configs = local_configs(config, tmp_path / "run", share=[*ALL, *(["status"] if shared else [])])
    configs = {name: own.model_copy(update={"folder": str(tmp_path / name)}) for name, own in configs.items()}
    coordinate(job(config, tmp_path / "run", configs, local=False), DirectLink(answering(configs)))
    board = read_board(tmp_path / "run" / "federation")
    assert board["round"] == 1
    assert board["messages_down"] == board["messages_up"] > 3
    for entry in board["silos"].values():
        assert (entry["version"], entry["asked"], entry["waits"]) == (__version__, None, False)
        assert entry["seen"] is not None
        assert (entry["status"] is not None) == shared
    if shared:
        told = [entry["status"]["rows_fingerprint"] for entry in board["silos"].values()]
        assert len(set(told)) == len(told) == 3
        assert all(entry["status"]["disk_free_bytes"] > 0 for entry in board["silos"].values())


def test_a_chart_leaves_out_what_is_no_number():
    chart = curve_chart("x", {"a": [(1, None), (2, float("nan")), (3, 1.0)], "b": [(1, 2.0), (2, 3.0)]}, {"a": "red"})
    assert chart.count("<polyline") == 2
    assert "nan" not in chart
    assert curve_chart("x", {"a": [(1, None)]}, {}) == ""


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_chromium_shows_the_page(running, tmp_path):
    """Chromium renders the curves, and what a silo says is text, not a script."""
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
             f"--user-data-dir={tmp_path / 'profile'}"]  # fmt: skip
    with status_server(running, print, nodes) as server:
        address = f"http://127.0.0.1:{server.port}/"
        shown = subprocess.run([*words, "--dump-dom", address], capture_output=True, text=True, timeout=120)
        picture = tmp_path / "page.png"
        subprocess.run(
            [*words, "--window-size=1100,1500", f"--screenshot={picture}", address], capture_output=True, timeout=120
        )
    assert shown.stdout.count("<polyline") == 3
    assert "<script" not in shown.stdout
    assert "&lt;script&gt;" in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
