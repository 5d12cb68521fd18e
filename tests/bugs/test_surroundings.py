"""What surrounds a run: proxies, folders for temporary files, scripts on standard input, systems that are not POSIX."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from silotune.core.files import folder_lock, is_locked
from silotune.core.workers import Workers, worker_pool
from silotune.deploy.doctor import check_proxy
from silotune.deploy.enrollment import PATH, ask, enroll, serve_enrollment
from silotune.deploy.files import require_root
from silotune.deploy.initialize import init
from silotune.deploy.nodes import Invitation
from silotune.deploy.settings import read_coordinator_settings
from silotune.distributed.flower.commands import flower_environment, free_ports
from silotune.distributed.local.run_local import run_local
from silotune.distributed.silo.worker import serve
from silotune.errors import InputError, SilotuneError
from silotune.lab.compare import compare
from tests.support.proxies import PROXIES, proxy_to


@pytest.fixture
def without_proxy(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# -- proxies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "kept"), [(None, ""), ("intranet.example", "intranet.example,")])
@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_flowers_processes_reach_this_machine_without_a_proxy(without_proxy, tmp_path, given, kept, name):
    without_proxy.setenv("http_proxy", "http://127.0.0.1:9")
    if given:
        without_proxy.setenv(name, given)
    made = flower_environment(tmp_path)
    assert made["no_proxy"] == made["NO_PROXY"] == f"{kept}127.0.0.1,localhost,::1"
    assert made["http_proxy"] == "http://127.0.0.1:9"


def enrolling(folder, host):
    """A coordinator that answers `/v1/enroll`; its port and authority."""
    init(folder, host)
    (port,) = free_ports(1)
    settings = read_coordinator_settings(folder / "coordinator.yaml")
    server = serve_enrollment(settings.model_copy(update={"enrollment_port": port, "folder": str(folder)}), print)
    return server, port, folder / "tls" / "ca.pem"


def test_a_silo_reaches_its_coordinator_through_a_proxy_with_a_password(without_proxy, tmp_path):
    asked, name = [], "coordinator.example:443"
    (server, port, ca), (other, foreign, _) = (enrolling(tmp_path / at, "coordinator.example") for at in ("co", "corp"))
    with server, other, proxy_to(port, asked) as proxy, proxy_to(foreign, asked) as inspecting:
        without_proxy.setenv("HTTPS_PROXY", f"http://me:secret@{proxy}")
        assert ask(name, ca, "GET", PATH)[0] == 200
        assert asked == [name]
        assert ask(f"localhost:{port}", ca, "GET", PATH)[0] == 200
        assert asked == [name], "this machine is reached without it"

        without_proxy.setenv("HTTPS_PROXY", f"http://me:wrong@{proxy}")
        invitation = Invitation(silo="north", superlink=name, token="t", expires="", fingerprint="", ca=ca.read_text())
        with pytest.raises(SilotuneError, match=f"does not answer through the proxy {proxy} .*407") as refused:
            enroll(invitation, b"key")
        (connection, *_) = check_proxy(name, ca)
        assert f"through the proxy {proxy}" in connection.detail
        assert "wrong" not in f"{refused.value}{connection.detail}"

        without_proxy.setenv("HTTPS_PROXY", f"http://me:secret@{inspecting}")
        with pytest.raises(InputError, match=rf"CN=silotune federation of .* issued it: {inspecting} inspects TLS\?"):
            ask(name, ca, "GET", PATH)

        without_proxy.setenv("no_proxy", "coordinator.example")
        asked.clear()
        with pytest.raises(SilotuneError, match=r"does not answer \("):
            ask(name, ca, "GET", PATH)
        assert asked == []
        server.shutdown()
        other.shutdown()


# -- folders for temporary files, and scripts --------------------------------------------------------------------------


@pytest.fixture
def long_folder(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.mark.usefixtures("long_folder")
@pytest.mark.parametrize(
    "start",
    [
        lambda out: compare("demo", methods=["local"], workers=2, out=out),
        lambda out: run_local(None, out),
        lambda out: Workers(2),
    ],
)
def test_a_long_folder_for_sockets_is_refused_by_its_variable(start, tmp_path):
    with pytest.raises(InputError, match=r"TMPDIR: .* set TMPDIR to a folder whose path has at most 72 bytes"):
        start(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("long_folder")
def test_one_process_needs_no_sockets():
    assert Workers(1).here


@pytest.mark.long
def test_processes_fit_into_the_longest_folder(tmp_path, monkeypatch):
    folder = tempfile.mkdtemp(prefix="x" * (72 - len(tempfile.gettempdir()) - 9))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from silotune.core.workers import *\nwith worker_pool(2) as p: print(p.submit(max, 1, 2).result())",
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": folder},
    )
    Path(folder).rmdir()
    assert (done.stdout, len(folder)) == ("2\n", 72), done.stderr


@pytest.mark.long
def test_processes_for_a_script_on_standard_input_are_refused():
    script = "from silotune.core.workers import Workers\nWorkers(1)\nWorkers(2)\n"
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "<stdin> is no file" in done.stderr.splitlines()[-1]
    assert "use workers=1" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("file", [None, __file__])
def test_a_script_in_a_file_or_in_words_may_have_processes(monkeypatch, file):
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert Workers(2).number == 2


def fail(*_):
    raise OSError("no such device")


def test_a_worker_that_cannot_start_is_not_said_to_lack_memory(monkeypatch):
    monkeypatch.setattr("silotune.core.workers._initialize_worker", fail)
    with pytest.raises(SilotuneError, match="see its own message above"), worker_pool(1) as pool:
        pool.submit(max, 1, 2).result()


# -- systems that are not POSIX ----------------------------------------------------------------------------------------

ALONE = """
import sys
for name in ("fcntl", "grp", "pwd", "resource"):
    sys.modules[name] = None
import silotune.deploy.joining, silotune.deploy.doctor, silotune.deploy.processes, silotune.distributed.silo.session
import silotune.distributed.silo.worker, silotune.distributed.flower.client_app, silotune.distributed.local.run_local
import silotune.distributed.flower.supernode, silotune.deploy.silo_commands, silotune.deploy.processes
from silotune.core.clock import current_user
from silotune.core.files import folder_lock, is_locked
from silotune.distributed.silo.policy import memory_mib
from pathlib import Path
with folder_lock(Path(sys.argv[1])):
    assert is_locked(Path(sys.argv[1]))
assert not is_locked(Path(sys.argv[1]))
assert current_user() and memory_mib() > 1
"""


@pytest.mark.long
def test_a_silos_side_needs_no_module_of_posix_alone(tmp_path):
    done = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_folder_is_released_where_open_files_cannot_be_removed(tmp_path, monkeypatch):
    def unlink(*_args, **_options):
        raise PermissionError(13, "is used by another process")

    with folder_lock(tmp_path):
        monkeypatch.setattr(Path, "unlink", unlink)
    assert not is_locked(tmp_path)


@pytest.mark.parametrize(("module", "name"), [(socket, "AF_UNIX"), (os, "fork")])
@pytest.mark.parametrize(
    ("what", "start"),
    [
        ("--engine flower-local", lambda: run_local(None, Path("out"))),
        ("silotune worker", lambda: serve(None)),
        ("--install", require_root),
    ],
)
def test_what_cannot_run_without_posix_says_so_in_one_line(monkeypatch, module, name, what, start):
    monkeypatch.delattr(module, name)
    with pytest.raises(InputError, match=f"{what}: cannot run here, as it needs Linux or macOS; on Windows use WSL"):
        start()
