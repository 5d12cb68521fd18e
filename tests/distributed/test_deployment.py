"""Files of coordinator, silo and node; whose key is let in; what `deploy/` holds. Without Flower's processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import yaml

from silotune.deploy import nodes, processes
from silotune.deploy.enrollment import ask
from silotune.deploy.processes import NodeLink
from silotune.deploy.settings import (
    CoordinatorSettings,
    NodeSettings,
    read_coordinator_settings,
    read_party,
    read_silo_or_node_settings,
)
from silotune.distributed.flower import commands as flwr_commands
from silotune.distributed.metrics import link_measures
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.errors import InputError, SilotuneError

DEPLOY = Path(__file__).parents[2] / "deploy"
LINK = {"folder": "state", "ca": "tls/ca.pem", "certificate": "tls/server.pem", "key": "tls/server.key"}
NODE = {"name": "north", "folder": "node", "socket": "run/w.sock", "superlink": "coordinator.example.org:443"}
NODE |= {"root_certificates": "ca.pem", "private_key": "north"}
SILO = NODE | {"share": [], "policy": "trusting", "data": {"path": "rows.csv"}}


def written(folder, tree):
    path = folder / "file.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))
    return path


def test_whose_file_it_is(tmp_path):
    link, node, silo = (read_party(written(tmp_path, tree)) for tree in (LINK, NODE, SILO))
    assert (type(link), type(node), type(silo)) == (CoordinatorSettings, NodeSettings, SiloSettings)
    assert (link.folder, link.ca) == (str(tmp_path / "state"), str(tmp_path / "tls/ca.pem"))
    assert str(node.socket_path) == str(silo.socket_path) == str(tmp_path / "run/w.sock")


REFUSED = [
    *(
        (LINK, {"host": host}, r"host: .*can run code on the silos; allowed: 127\.0\.0\.1, localhost")
        for host in ("0.0.0.0", "::", "192.0.2.1", "coordinator.example.org", "")
    ),
    (LINK, {"key": None}, "give ca, certificate and key"),
    (LINK, {"insecure": True}, "insecure: excludes ca"),
    (LINK, {"port": 0}, "port"),
    (LINK, {"ports": 1}, "did you mean 'port'"),
    *(
        (tree, change, message)
        for tree in (NODE, SILO)
        for change, message in [
            ({"private_key": None}, "give root_certificates and private_key"),
            ({"root_certificates": None}, "give root_certificates and private_key"),
            ({"root_certificates": None, "private_key": None, "insecure": True}, "insecure: for one machine only"),
            ({"insecure": True, "superlink": "127.0.0.1:8000"}, "insecure: excludes"),
        ]
    ),
    (NODE, {"superlink": None}, "superlink"),
    (SILO, {"superlink": None}, "superlink: give the address"),
    (SILO, {"share": None}, "share"),
    (SILO, {"share": ["everything"]}, "validation"),
    (SILO, {"data": None}, "give data"),
    (SILO, {"rows": "rows"}, "give data"),
    (SILO, {"folder": ""}, "folder"),
    (SILO, {"shares": []}, "did you mean 'share'"),
    (SILO, {"socket": "/tmp/" + "x" * 120}, "too long for a Unix socket"),
    (SILO, {"data": {"path": "d", "name": "south"}}, "data.name"),
    (SILO, {"policy": None}, "policy: choose who may learn what"),
    (SILO, {"policy": "trustng"}, "did you mean 'trusting'"),
    (SILO, {"policy": "masked"}, "needs the silos that it sums with"),
    (SILO, {"policy": "private"}, "needs the budget of each row or person"),
    (SILO, {"policy": {"rounds": 3}}, "preset: choose who may learn what: trusting .*; masked .*; private"),
    (SILO, {"policy": {"preset": "trusting", "round": 3}}, "did you mean 'policy.rounds'"),
    (SILO, {"policy": {"preset": "trusting", "effective_rows": 5}}, "unknown key 'policy.effective_rows'"),
    (SILO, {"policy": {"preset": "trusting", "numbers_per_round": "3 percent"}}, "such as 3%"),
]
"""The tree of a party's file, keys that are other than there, and words of the line."""


@pytest.mark.parametrize(("tree", "change", "message"), REFUSED)
def test_a_partys_file_is_checked(tmp_path, tree, change, message):
    """`tests/bugs/test_marks_and_addresses.py` has addresses."""
    path = written(tmp_path, tree | change)
    with pytest.raises(InputError, match=message) as refused:
        read_party(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("party", ["node", "coordinator"])
def test_a_port_that_is_in_use_is_said_before_anything_starts(tmp_path, party):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        plain = {"folder": "state", "insecure": True, "port": port}
        if party == "node":
            more = {"name": "north", "socket": "run/w.sock", "superlink": "127.0.0.1:8000"}
            begin, settings = (
                partial(processes.join, tmp_path / "file.yaml"),
                read_party(written(tmp_path, plain | more)),
            )
        else:
            begin, settings = processes.up, read_party(written(tmp_path, plain))
        with pytest.raises(InputError, match=f"port {port}: is in use"):
            begin(settings, print)


def test_one_command_at_a_time_works_in_a_folder(tmp_path):
    party = processes._processes
    with party(tmp_path), pytest.raises(InputError, match="already running"), party(tmp_path):
        pass
    with party(tmp_path):
        pass


def test_a_child_that_ends_ends_its_command_and_its_siblings(tmp_path):
    with processes._processes(tmp_path) as running:
        running.start("worker", ["sleep", "60"])
        worker = running._running["worker"]
        running.start("supernode", ["sh", "-c", "exit 3"])
        running._running["supernode"].wait()
        with pytest.raises(
            SilotuneError, match="supernode: ended with code 3; code 2004 above: its key is not admitted"
        ):
            running.check()
    assert worker.returncode == -signal.SIGTERM


def test_a_node_that_gives_up_ends_with_a_code_of_its_own(tmp_path, monkeypatch):
    """Flower's main thread is over after an error of TLS, and its other threads keep the process alive."""
    (tmp_path / "flwr" / "supernode").mkdir(parents=True)
    (tmp_path / "flwr" / "supercore" / "inflatable").mkdir(parents=True)
    for package in ("flwr", "flwr/supernode", "flwr/supercore", "flwr/supercore/inflatable"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "flwr" / "supernode" / "start_client_internal.py").write_text("_push_messages = None\n")
    (tmp_path / "flwr" / "supercore" / "inflatable" / "inflatable_utils.py").write_text(
        "def pull_objects(*, initial_backoff=1): ...\npull_and_inflate_object_from_tree = pull_objects\n"
    )
    (tmp_path / "flwr" / "supernode" / "cli.py").write_text(
        "import threading, time\n"
        "def flower_supernode():\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    raise RuntimeError('certificate verify failed')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with processes._processes(tmp_path / "node") as running:
        running.start("supernode", [sys.executable, "-m", "silotune.distributed.flower.supernode"])
        running._running["supernode"].wait(30)
        with pytest.raises(processes.LinkLost, match="lost its link for good") as lost:
            running.check()
    assert lost.value.exit_code == 75


def test_a_nodes_status_tells_its_link_and_fails_while_it_is_down(silotune, tmp_path):
    file = written(tmp_path, NODE)
    link = NodeLink(read_silo_or_node_settings(file))
    assert silotune("federation", "status", file, "--check").code == 1  # it does not run
    with processes._processes(tmp_path / "node"):
        link.keep("", {"coordinator": 11.9, "authority": 1800})
        up = silotune("federation", "status", file, "--check")
        assert (up.code, up.err) == (0, "")
        assert "certificates: coordinator's 11 days left, authority's 1800 days left" in up.out
    assert "link: up" not in silotune("federation", "status", file).out, "the node has ended"
    with processes._processes(tmp_path / "node"):
        for _ in range(2):
            link.keep("certificate has expired")
        down = silotune("federation", "status", file, "--check")
        assert down.code == 1
        assert "(certificate has expired)" in down.out
        told = json.loads(silotune("federation", "status", file, "--json").out)["link"]
        assert (told["losses"], told["days"]) == (1, {"authority": 1800})  # nobody knows of the coordinator's
        values = {metric.name: metric.samples[0].value for metric in link_measures(tmp_path / "node")}
    assert values == {"silotune_link_up": 0, "silotune_link_losses": 1, "silotune_certificate_days_left": 1800}


def test_logs_may_be_json(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SILOTUNE_LOG", "json")
    with processes._processes(tmp_path) as running:
        running.start("supernode", ["printf", '\033[92mINFO\033[0m: one\n\n{"time": "", "text": "two"}\n'])
        running._running["supernode"].wait(30)
        for thread in [each for each in threading.enumerate() if "_log_as_json" in each.name]:
            thread.join(30)
    assert [json.loads(line)["text"] for line in capfd.readouterr().out.splitlines()] == ["supernode: INFO: one", "two"]


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def link(tmp_path):
    return read_coordinator_settings(written(tmp_path, LINK))


@pytest.fixture
def flwr(monkeypatch):
    """What `flwr` was asked, and what it is to answer."""

    class Flwr:
        calls: list[list[str]] = []
        answer = {"success": True, "node-id": 17}

        def run(self, words, **options):
            self.calls.append(words)
            assert options["env"]["FLWR_HOME"].endswith("flwr")
            return subprocess.CompletedProcess(words, 0, json.dumps(self.answer), "")

    recorder = Flwr()
    recorder.calls = []
    monkeypatch.setattr(flwr_commands.subprocess, "run", recorder.run)
    return recorder


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "north.pub"
    path.write_text("ecdsa-sha2-nistp384 AAAA north\n")
    return path


def test_a_silo_has_one_key_until_it_is_expelled(link, flwr, key):
    assert nodes.register_node(link, "north", key) == "17"
    assert flwr.calls == [
        ["flwr", "supernode", "register", str(key), "silotune", "--name", "silo-north", "--format", "json"]
    ]
    with pytest.raises(InputError, match="silo 'north': is node 17 already"):
        nodes.register_node(link, "north", key)
    assert len(flwr.calls) == 1
    with pytest.raises(InputError, match="'south': not admitted; admitted: north"):
        nodes.unregister_node(link, "south")
    assert nodes.unregister_node(link, "north") == "17"
    assert flwr.calls[-1] == ["flwr", "supernode", "unregister", "17", "silotune", "--format", "json"]
    assert nodes.registered_nodes(link) == {}


def test_a_silo_that_a_new_superlink_does_not_know_is_expelled(link, flwr, key, monkeypatch):
    """As after the loss of `superlink.db`: else no invitation could bring the silo back."""
    nodes.register_node(link, "north", key)
    known = [{"node-id": "17", "status": "offline"}]

    def answered(_settings, failure, *words):
        if words[0] == "unregister":
            raise SilotuneError(f"{failure}: [code: 24] Node ID not found for account.")
        return {"nodes": known}

    monkeypatch.setattr(nodes, "_flwr_supernode", answered)
    with pytest.raises(SilotuneError, match=r"silo 'north' was not expelled: \[code: 24\]"):
        nodes.unregister_node(link, "north")
    known.clear()
    assert nodes.unregister_node(link, "north") == "17"
    assert nodes.registered_nodes(link) == {}


def test_a_refusal_is_said_in_flowers_words_and_nothing_is_kept(link, flwr, key):
    flwr.answer = {"success": False, "error-message": "Using …\n\n[code: 23] Public key already in use."}
    with pytest.raises(SilotuneError, match=r"silo 'north' was not admitted: .*\[code: 23\] Public key already in use"):
        nodes.register_node(link, "north", key)
    assert nodes.registered_nodes(link) == {}


def test_a_superlink_that_does_not_answer_is_named(link, key, tmp_path, monkeypatch):
    def run(words, *, timeout, **options):
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(flwr_commands.subprocess, "run", run)
    with pytest.raises(SilotuneError, match="silo 'north' was not admitted: the SuperLink did not answer within 300 s"):
        nodes.register_node(link, "north", key)
    with pytest.raises(SilotuneError, match="flwr run: the SuperLink did not answer within 300 s"):
        flwr_commands.submit_job(tmp_path / "app", tmp_path / "job", {})


def test_what_cannot_be_a_silos_key_is_not_sent(link, flwr, key, tmp_path):
    private = tmp_path / "north"
    private.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    for silo, path, message in [
        ("north", private, "is a private key"),
        ("north", tmp_path / "none.pub", "no such file"),
        ("../north", key, "cannot be a name"),
        ("silo-north", key, "not beginning with 'silo-'"),  # the node of `north` is registered as silo-north
    ]:
        with pytest.raises(InputError, match=message):
            nodes.register_node(link, silo, path)
    assert flwr.calls == []


def test_nodes_are_called_by_their_silos(link, flwr, key):
    nodes.register_node(link, "north", key)
    flwr.answer = {
        "success": True,
        "nodes": [
            {"node-id": "17", "owner-name": "none", "status": "online"},
            {"node-id": "18", "owner-name": "none", "status": "offline"},
            {"node-id": "19", "owner-name": "none", "status": "unregistered"},
        ],
    }
    assert nodes.node_statuses(link) == {"north": "online", "node 18": "offline"}


# -- before a silo joins -----------------------------------------------------------------------------------------------


def test_what_is_no_tls_is_named_before_anything_starts(tmp_path):
    certificate(tmp_path, "ca")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(InputError, match=f"coordinator {address}: TLS failed"):
            ask(address, tmp_path / "ca.pem", "GET", "/health")
        thread.join()
    with pytest.raises(SilotuneError, match="does not answer"):
        ask(address, tmp_path / "ca.pem", "GET", "/health")
    (tmp_path / "broken.pem").write_text("no certificate")
    for name in ("none.pem", "broken.pem"):
        with pytest.raises(InputError, match="the authority's certificate: cannot be used"):
            ask(address, tmp_path / name, "GET", "/health")


def certificate(folder, name):
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem"), "-subj", f"/CN={name}"]
    subprocess.run(words, check=True, capture_output=True)


@pytest.mark.parametrize(("tree", "started"), [(NODE, ["supernode"]), (SILO, ["worker", "supernode"])])
def test_a_nodes_file_starts_no_worker(tmp_path, monkeypatch, tree, started):
    begun = []

    class Children:
        def start(self, name, words):
            begun.append((name, words))

        def check(self):
            raise SilotuneError("enough")

    @contextmanager
    def running(folder):
        assert folder == tmp_path / "node"
        yield Children()

    monkeypatch.setattr(processes, "_processes", running)
    monkeypatch.setattr(NodeLink, "try_now", lambda _: None)
    path = written(tmp_path, tree)
    with pytest.raises(SilotuneError, match="enough"):
        processes.join(path, read_silo_or_node_settings(path), lambda _: None)
    assert [name for name, _ in begun] == started
    words = begun[-1][1]
    assert words[words.index("--auth-supernode-private-key") + 1] == str(tmp_path / "north")
    assert f'silo="north" worker="{tmp_path / "run/w.sock"}"' in words
    assert "--insecure" not in words


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"folder .*file: must be this user's own"),
        processes._processes(tmp_path / "file"),
    ):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end processes")
def test_what_up_began_ends_with_it_when_it_is_killed(tmp_path):
    """A SuperLink that stays would hold the port, and the next `up` would refuse."""

    def begin(pipe):
        children = processes._Processes(tmp_path)
        children.start("superlink", ["sleep", "600"])
        pipe.send(children._running["superlink"].pid)
        time.sleep(600)

    context = get_context("fork")
    ours, theirs = context.Pipe()
    parent = context.Process(target=begin, args=(theirs,))
    parent.start()
    stat = Path(f"/proc/{ours.recv()}/stat")
    parent.kill()
    parent.join()
    until = time.monotonic() + 60
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


# -- deploy/ -----------------------------------------------------------------------------------------------------------


def test_compose_keeps_rows_from_the_network_and_the_superlink_from_everybody():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert services["worker"]["network_mode"] == "none"
    assert "ports" not in services["worker"]
    assert not any("data" in volume for volume in services["node"]["volumes"])
    published = {port for service in services.values() for port in service.get("ports", [])}
    assert published == {"443:443"}
    assert services["proxy"]["network_mode"] == "service:superlink"
    for name in ("superlink", "worker", "node"):
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["user"].split(":")[0] not in ("0", "root")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("systemd/*.service")), ids=lambda path: path.stem)
def test_units_are_what_systemd_reads(unit):
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=300)
    message = [line for line in done.stderr.splitlines() if "is not executable" not in line and unit.name in line]
    assert message == []


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd is not installed")
@pytest.mark.parametrize("party", ["coordinator", "silo"])
def test_systemd_makes_the_users_and_modes(tmp_path, party):
    """In a root of its own: who runs what, and who reads what, is in these files and nowhere else."""
    etc = tmp_path / "etc"
    (etc / "silotune" / "tls").mkdir(parents=True)
    for name in ("silo.yaml", "node.yaml", "silo.key", "tls/server.key"):
        (etc / "silotune" / name).write_text("")
        (etc / "silotune" / name).chmod(0o644)
    (tmp_path / "var" / "lib").mkdir(parents=True)
    for command, kind in ((["systemd-sysusers"], "sysusers"), (["systemd-tmpfiles", "--create"], "tmpfiles")):
        file = DEPLOY / "systemd" / f"{party}.{kind}.conf"
        done = subprocess.run([*command, f"--root={tmp_path}", str(file.resolve())], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    users = {line.split(":")[2]: line.split(":")[0] for line in (etc / "passwd").read_text().splitlines()}
    private = {
        str(path.relative_to(tmp_path)): users[str(path.stat().st_uid)]
        for path in sorted(tmp_path.rglob("*"))
        if str(path.stat().st_uid) in users and path.stat().st_uid and not path.stat().st_mode & 0o077
    }
    assert private == {
        "coordinator": dict.fromkeys(
            ("etc/silotune/tls/server.key", "var/lib/silotune", "var/lib/silotune/link",
             "var/lib/silotune/link/records.db"), "silotune"),
        "silo": {"etc/silotune/node.yaml": "silotune-node", "etc/silotune/silo.key": "silotune-node",
                 "etc/silotune/silo.yaml": "silotune-worker"},
    }[party]  # fmt: skip
