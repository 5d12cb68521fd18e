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

from silotune.core.locking import folder_lock, is_locked
from silotune.core.workers import Workers, worker_pool
from silotune.deploy.doctor import check_proxy
from silotune.deploy.enrollment import enroll
from silotune.deploy.files import require_root
from silotune.deploy.initialize import init
from silotune.deploy.invitations import Invitation
from silotune.distributed.flower.commands import flower_environment, free_ports
from silotune.distributed.local.run_local import run_local
from silotune.distributed.silo.worker import serve
from silotune.errors import InputError, SilotuneError
from silotune.lab.compare import compare

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


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


@pytest.fixture
def unreachable(tmp_path):
    """An invitation of a coordinator that does not run."""
    init(tmp_path / "co", "localhost")
    (port,) = free_ports(1)
    ca = (tmp_path / "co" / "tls" / "ca.pem").read_text()
    return Invitation("north", f"localhost:{port}", "token", "", "", ca), tmp_path / "co" / "tls" / "ca.pem"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"https_proxy": "http://me:secret@proxy.example:3128"}, "the proxy proxy.example:3128 is set (https_proxy)"),
        ({"HTTPS_PROXY": "proxy.example:3128"}, "the proxy proxy.example:3128 is set"),
        ({"https_proxy": "http://proxy.example:3128", "no_proxy": "localhost"}, ""),
        ({"http_proxy": "http://proxy.example:3128"}, ""),
    ],
)
def test_join_and_doctor_name_the_proxy_that_they_do_not_use(without_proxy, unreachable, variables, said):
    invitation, ca = unreachable
    for name, value in variables.items():
        without_proxy.setenv(name, value)
    with pytest.raises(SilotuneError, match="does not answer") as error:
        enroll(invitation, b"key")
    (connection, *_) = check_proxy(invitation.superlink, ca)
    for text in (str(error.value), connection.detail):
        assert said in text
        assert ("proxy" in text) == bool(said)
        assert "secret" not in text


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


def fail(_):
    raise OSError("no such device")


def test_a_worker_that_cannot_start_is_not_said_to_lack_memory():
    with pytest.raises(SilotuneError, match="see its own message above"), worker_pool(1, prepare=fail) as pool:
        pool.submit(max, 1, 2).result()


# -- systems that are not POSIX ----------------------------------------------------------------------------------------

ALONE = """
import sys
for name in ("fcntl", "grp", "pwd", "resource"):
    sys.modules[name] = None
import silotune.deploy.joining, silotune.deploy.doctor, silotune.deploy.processes, silotune.distributed.silo.session
import silotune.distributed.silo.worker, silotune.distributed.flower.client_app, silotune.distributed.local.run_local
from silotune.core.clock import current_user
from silotune.core.locking import folder_lock, is_locked
from silotune.distributed.silo.policy import memory_mib
from pathlib import Path
with folder_lock(Path(sys.argv[1])):
    assert is_locked(Path(sys.argv[1]))
assert not is_locked(Path(sys.argv[1]))
assert current_user() and memory_mib() > 1
"""


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
