"""One coordinator and three silos, each with its own processes, folder and network: MiniLM, TLS, node keys, nginx.

Every party lives in a Linux network namespace of its own; a bridge in the coordinator's joins them. GLUE's rows where
`SILOTUNE_GLUE` names a folder with them, else the demo's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from silotune.config import Config, dump
from silotune.data.loading import load_silos
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from tests.support.deployed import IP, LONGEST, NGINX, Deployed, make_network, may_have_namespaces, silo_files

TCPDUMP = shutil.which("tcpdump") or shutil.which("tcpdump", path="/usr/sbin:/sbin")
NET = "10.213.77"
MADE_OF_LETTERS = re.compile(rb"[\x20-\x7e]{12,}")


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed"),
    pytest.mark.skipif(TCPDUMP is None, reason="tcpdump is not installed"),
    pytest.mark.skipif(not may_have_namespaces(), reason="network namespaces need root and `ip`"),
]


@dataclass
class Apart(Deployed):
    """A federation whose parties share no network: `coordinator` with a bridge, and one namespace a silo."""

    silos: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.host, self.interface = "coordinator.test", f"{NET}.1"
        super().__post_init__()
        for party in ("coordinator", *self.silos):
            etc = Path("/etc/netns") / self.space(party)
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{NET}.1 {self.host}\n")
        make_network(self.space("coordinator"), [self.space(silo) for silo in self.silos], NET)

    def space(self, party: str) -> str:
        return f"{self.folder.name}-{party if party in self.silos else 'coordinator'}"

    def inside(self, party: str) -> list[str]:
        return [str(IP), "netns", "exec", self.space(party)]

    def reachable(self) -> bool:
        return self.connects("coordinator", f"{NET}.1", self.proxy)

    def connects(self, party: str, address: str, port: int) -> bool:
        """Whether a party gets a connection."""
        program = f"import socket; socket.create_connection(({address!r}, {port}), 5)"
        words = [*self.inside(party), sys.executable, "-c", program]
        return subprocess.run(words, capture_output=True, check=False, timeout=60).returncode == 0

    def listening(self, party: str) -> set[str]:
        """Addresses and ports on which a party takes TCP connections, from any process in its namespace."""
        done = subprocess.run([*self.inside(party), "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True,
                              text=True, check=True, timeout=60)  # fmt: skip
        rows = [line.split() for line in done.stdout.splitlines() if ":" in line.split()[1]]
        sockets = set()
        for row in rows:
            if row[3] == "0A":  # listens
                address, port = row[1].split(":")
                shown = ".".join(str(byte) for byte in reversed(bytes.fromhex(address))) if len(address) == 8 else "v6"
                sockets.add(f"{shown}:{int(port, 16)}")
        return sockets

    def sent(self, silo: str) -> int:
        """Bytes that have left a silo's interface, headers and all."""
        words = [*self.inside(silo), "cat", "/sys/class/net/net/statistics/tx_bytes"]
        return int(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)

    def end(self) -> None:
        super().end()
        for party in ("coordinator", *self.silos):
            subprocess.run([str(IP), "netns", "del", self.space(party)], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / self.space(party), ignore_errors=True)


def settings() -> Config:
    """Three tasks, MiniLM, adapters wide enough for messages of more than a MiB."""
    glue = os.environ.get("SILOTUNE_GLUE")
    names = "sentiment,paraphrase,inference" if glue is None else "MRPC,RTE,SST-2"
    common = [
        f"data.tasks=[{names}]",
        f"federation.silos=[{names}]",
        "backbone=default",
        "tuner.r=64",
        "rounds=2",
        "train.batch_size=16",
        "precision=fp32",
        "threads=1",
        "method=fedmcp",
    ]
    if glue is None:
        return read_config("demo", ["data.rows_per_silo=80", *common])
    return read_config("fedmcp-glue", [f"data.path={glue}", "data.rows_per_silo=150", *common])


@pytest.fixture
def apart() -> Iterator[Apart]:
    names = tuple(silo.name for silo in load_silos(settings()))
    with tempfile.TemporaryDirectory(prefix="st") as folder:
        deployment = Apart(Path(folder), silos=names)
        try:
            deployment.up()
            yield deployment
        finally:
            deployment.end()


def test_three_silos_with_minilm(apart, tmp_path, capsys):
    config = settings()
    expected = run(config, out=tmp_path / "whole").summary
    assert len(apart.silos) == 3
    files = silo_files(apart, config)
    for name in apart.silos:
        done = apart.command("federation", "admit", apart.link, name, apart.folder / name / "key.pub")
        assert done.returncode == 0, done.stderr
    # one silo's whole traffic is written down
    first = apart.silos[0]
    capture = apart.folder / "capture.pcap"
    words = [str(TCPDUMP), "-i", "net", "-U", "-s", "0", "-Z", "root", "-w", str(capture)]
    apart.begin(first, *words)
    apart.begun["tcpdump"] = apart.begun.pop(first)
    apart.until(lambda: capture.exists(), "tcpdump")
    for name in apart.silos:
        apart.begin(name, "federation", "join", files[name])
    until = time.monotonic() + LONGEST
    while len(online := apart.online()) < 3:
        assert time.monotonic() < until, online
        time.sleep(1)
    # nothing listens but what docs/deployment.md says; what is on loopback is out of reach for silos
    assert apart.listening("coordinator") == {f"{NET}.1:{apart.proxy}", f"127.0.0.1:{apart.port}"}
    for name in apart.silos:
        assert {address.split(":")[0] for address in apart.listening(name)} == {"127.0.0.1"}
        assert not apart.connects(name, f"{NET}.1", apart.port)
        assert apart.connects(name, f"{NET}.1", apart.proxy)
    # the run
    (apart.folder / "run.yaml").write_text(dump(config), encoding="utf-8")
    out, before = apart.folder / "out", apart.sent(first)
    started = apart.command("federation", "start", apart.link, apart.folder / "run.yaml", "--out", out)
    assert started.returncode == 0, started.stderr + started.stdout
    summary = read_summary(out)
    wire, shared = apart.sent(first) - before, summary["bytes_up"] / len(apart.silos)
    for field in ("shared_sha256", "silos", "average", "best_round", "bytes_up", "bytes_down"):
        assert summary[field] == expected[field], field
    # each silo's private parts are in its own folder
    for name in apart.silos:
        kept = [path for path in (apart.folder / name).rglob("*.safetensors") if b'"private/' in path.read_bytes()]
        assert kept, name
    elsewhere = [path for party in ("c", "out") for path in (apart.folder / party).rglob("*.safetensors")]
    assert elsewhere
    assert not [path for path in elsewhere if b'"private/' in path.read_bytes()]
    # the capture: the updates went through it, and no text is readable
    apart.begun["tcpdump"].terminate()
    apart.begun["tcpdump"].wait(timeout=60)
    traffic = capture.read_bytes()
    assert len(traffic) >= shared
    readable = b"\n".join(MADE_OF_LETTERS.findall(traffic)).lower()
    texts = {text for silo in load_silos(config) for row in silo.splits.train for text in row.texts if len(text) > 12}
    assert len(texts) > 100
    assert not [text for text in texts if text.encode().lower()[:12] in readable]
    with capsys.disabled():
        print(f"\n{first}: {wire} bytes left its interface, {shared:.0f} of them messages; {wire / shared:.3f}")
    assert wire / shared <= 1.15  # polls, TCP and TLS as well; the message itself is in test_security_messages.py
