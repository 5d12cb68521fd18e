"""Frames and the worker's socket: what is cut off, too slow or no frame is refused, and the worker goes on."""

from __future__ import annotations

import socket
import stat
import struct
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from silotune.cli.main import main
from silotune.data.row_folder import read_rows, write_rows
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import Frame, ProtocolError, ask_worker, decode
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.distributed.silo.store import SiloStore
from silotune.distributed.silo.worker import ping, serve
from silotune.errors import InputError, SilotuneError
from tests.support.command_line import Silotune
from tests.support.session_rig import DirectLink, answering, job, local_configs

TEXTS = st.text(max_size=20)


@given(TEXTS, st.dictionaries(TEXTS, st.integers() | TEXTS | st.none()), st.dictionaries(TEXTS, st.binary(max_size=50)))
def test_a_frame_comes_back(kind, fields, blobs):
    frame = Frame(kind, fields, blobs)
    assert decode(frame.encode()) == frame


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda data: b"SLT1" + data))
def test_other_bytes_are_no_frame(data):
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.data())
def test_a_frame_that_is_cut_or_longer_is_refused(data):
    whole = Frame("round", {"n": 1}, {"broadcast": b"x" * 40, "b": b"y" * 3}).encode()
    end = data.draw(st.integers(0, len(whole) - 1))
    for damaged in (whole[:end], whole + b"z"):
        with pytest.raises(ProtocolError):
            decode(damaged)


@pytest.mark.parametrize(
    "header", [b"[]", b"{}", b'{"kind":1,"fields":{},"blobs":{}}', b'{"kind":"a","fields":{},"blobs":{"b":-1}}']
)
def test_a_damaged_header(header):
    with pytest.raises(ProtocolError):
        decode(b"SLT1" + struct.pack(">I", len(header)) + header)


def test_a_worker_that_does_not_answer_is_given_up(short):
    path = short / "w.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        began = time.monotonic()
        with pytest.raises(ProtocolError, match="no answer in time"):
            ask_worker(path, Frame("hello").encode(), patience=0.2)
        assert time.monotonic() - began < 30
    with pytest.raises(ProtocolError, match="no worker answers"):
        ask_worker(path, b"")
    with pytest.raises(ProtocolError, match="no worker answers"):
        ask_worker(short / "none.sock", b"")


@pytest.mark.parametrize("message", [b"", struct.pack(">Q", 100) + b"half", struct.pack(">Q", 2**60)])
def test_a_worker_that_breaks_off(short, message):
    path = short / "w.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(message)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ProtocolError, match=r"closed|too large"):
            ask_worker(path, Frame("hello").encode(), patience=20)
        thread.join()


# -- the process -------------------------------------------------------------------------------------------------------


def command(*words):
    sys.argv = ["silotune", *words]
    main()


@pytest.fixture
def worker(short, data_folder, backbone_folder):
    """`worker()` starts the command in a fork, which has imported all, and waits until it is ready; all are ended
    afterwards."""
    started = []
    tree = {
        "name": "alpha",
        "folder": "state",
        "data": {"path": str(data_folder / "alpha" / "train.jsonl"), "text": "sentence1", "label": "label"},
        "share": ["validation"],
        "policy": "trusting",
        "backbone": str(backbone_folder("bert")),
        "socket": str(short / "w.sock"),
    }
    path = short / "silo.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")

    def start():
        process = get_context("fork").Process(target=command, args=("worker", str(path)))
        process.start()
        started.append(process)
        until = time.monotonic() + 120
        while (message := ping(short / "w.sock")) is None or message["busy"]:
            assert process.is_alive()
            assert time.monotonic() < until
            time.sleep(0.05)
        return process

    start.socket = short / "w.sock"
    start.config = path
    yield start
    for process in started:
        process.kill()
        process.join(20)


def test_the_worker_survives_nonsense_and_a_kill_and_ends_when_told(worker, silotune: Silotune):
    process = worker()
    assert stat.S_IMODE(worker.socket.stat().st_mode) == 0o600
    with socket.socket(socket.AF_UNIX) as connection:  # goes away in the middle of a frame
        connection.connect(str(worker.socket))
        connection.sendall(struct.pack(">Q", 1000) + b"half")
    with socket.socket(socket.AF_UNIX) as connection:  # no frame at all
        connection.connect(str(worker.socket))
        connection.sendall(struct.pack(">Q", 3) + b"abc")
        assert connection.recv(10) == b""
    answer = decode(ask_worker(worker.socket, Frame("round", {"x": 1}).encode(), 60))
    assert (answer.kind, answer.fields["silo"]) == ("failed", "alpha")
    assert "without 'run'" in answer.fields["reason"]
    assert ping(worker.socket)["pid"] == process.pid
    second = silotune("worker", worker.config)
    assert second.code == 2
    assert "another one answers" in second.err
    process.kill()
    process.join(30)
    assert worker.socket.exists()  # left behind
    process = worker()
    assert ping(worker.socket)["pid"] == process.pid
    process.terminate()
    process.join(30)
    assert process.exitcode == 0
    assert not worker.socket.exists()


def test_a_file_where_the_socket_should_be_stays(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n")
    with pytest.raises(InputError, match=r"rows\.csv is there and is no socket"):
        serve(
            SiloSettings(
                name="north", folder=str(tmp_path), rows=str(tmp_path), share=[], policy="trusting", socket=str(path)
            )
        )
    assert path.read_text() == "text,label\n"


# -- files -------------------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were(tmp_path):
    texts = ("a\u2028b", 'tab\tand "quotes" and \\n'), ("ünï", "")
    rows = [Row(pair, label) for label, pair in enumerate(texts)]
    data = SiloData("north", Task("t", ("x", "y")), Splits(rows, rows[::-1], rows[:1]))
    write_rows(tmp_path / "rows", data)
    assert read_rows(tmp_path / "rows", "north") == data
    assert stat.S_IMODE((tmp_path / "rows").stat().st_mode) == 0o700
    for line, message in (
        ('[["a", "b"], 7, ""]', "label 7"),
        ('["ab", 1, ""]', "is not a row"),
        ("7", "cannot unpack"),
    ):
        (tmp_path / "rows" / "test.jsonl").write_text(f"{line}\n")
        with pytest.raises(InputError, match=rf"rows of silo 'north' .*missing or damaged .*{message}"):
            read_rows(tmp_path / "rows", "north")


def test_a_silo_without_a_row_to_train_on_is_refused(tiny_config, tmp_path, capfd):
    """The coordinator learns whose rows they are, the silo's operator what is wrong with them."""
    config = tiny_config("fedavg", "rounds=1")
    configs = local_configs(config, tmp_path / "run")
    (Path(configs["beta"].rows) / "train.jsonl").write_text("")
    link = DirectLink(answering(configs))
    with pytest.raises(SilotuneError, match=r"^silo 'beta': its rows cannot be used \(see the worker's log\)$"):
        coordinate(job(config, tmp_path / "run", configs), link)
    assert "train.jsonl has no row" in capfd.readouterr().err


@pytest.mark.parametrize("run", ["", "../../x", "0" * 15, "A" * 16, "0" * 16 + "/"])
def test_a_run_id_is_no_path(tmp_path, run):
    with pytest.raises(InputError, match="run id"):
        SiloStore(tmp_path / "silo").make_folder(run)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "../0001", "1", "0001-other", "0001/../../x", "0001.safetensors"])
def test_a_states_name_is_no_path(tmp_path, name):
    with pytest.raises(InputError, match="no name of a state"):
        SiloStore(tmp_path).read_state("0" * 16, name)
