"""A deployed federation on 127.0.0.1: certificates, keys, a folder for each party, nginx in front."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from silotune.config import Config
from silotune.distributed.flower.commands import ENVIRONMENT, free_ports, listens
from silotune.distributed.silo.silo_config import REHEARSAL
from tests.support.processes import end_with_parent
from tests.support.session_rig import ALL, local_configs

DEPLOY = Path(__file__).parents[2] / "deploy"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
IP = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin")
SILOS = ("alpha", "beta", "gamma")
LONGEST = 900
"""Seconds: the machine may be busy."""


def authority(folder: Path, host: str = "localhost") -> None:
    """Make a certificate authority and a server certificate with the commands of docs/deployment.md."""
    folder.mkdir(parents=True)
    (folder / "server.ext").write_text(
        f"subjectAltName=DNS:{host},DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth\n"
        "basicConstraints=CA:FALSE\n"
    )
    for words in (
        "ecparam -name prime256v1 -genkey -noout -out ca.key",
        "req -x509 -new -key ca.key -sha256 -days 2 -subj /CN=authority -addext basicConstraints=critical,CA:TRUE "
        "-addext keyUsage=critical,keyCertSign,cRLSign -out ca.pem",
        "ecparam -name prime256v1 -genkey -noout -out server.key",
        "req -new -key server.key -subj /CN=coordinator -out server.csr",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -sha256 -extfile server.ext "
        "-out server.pem",
    ):
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)


def key(path: Path) -> Path:
    """Make a silo's key pair and return the public key's path."""
    words = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(path)]
    subprocess.run(words, check=True, capture_output=True)
    return path.with_name(f"{path.name}.pub")


@dataclass
class Deployed:
    """Processes of one federation; `end` takes them all down."""

    folder: Path
    host: str = "localhost"
    interface: str = "127.0.0.1"
    port: int = 0
    proxy: int = 0
    begun: dict[str, subprocess.Popen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port, self.proxy = free_ports(2)
        self.tls = self.folder / "tls"
        authority(self.tls, self.host)
        self.link = self.write(
            "coordinator.yaml",
            {"folder": "c", "port": self.port, **{name: f"tls/{file}" for name, file in
             (("ca", "ca.pem"), ("certificate", "server.pem"), ("key", "server.key"))}},
        )  # fmt: skip

    @property
    def address(self) -> str:
        """Address that silos connect to: the proxy's."""
        return f"{self.host}:{self.proxy}"

    def write(self, name: str, tree: dict) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        return path

    def inside(self, party: str) -> list[str]:
        """Prefix of a party's commands; empty if all parties share this machine's network."""
        return []

    def command(self, *words: object, party: str = "coordinator") -> subprocess.CompletedProcess:
        """Run `silotune federation …` to its end."""
        words = [*self.inside(party), sys.executable, "-m", "silotune", *map(str, words)]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=LONGEST, env=self.environment(),
            preexec_fn=end_with_parent,
        )  # fmt: skip

    def online(self) -> list[str]:
        """Names of the silos whose nodes are connected."""
        state = json.loads(self.command("federation", "status", self.link, "--json").stdout)
        assert state["coordinator"]["running"]
        return [silo["silo"] for silo in state["silos"] if silo["online"]]

    def begin(self, name: str, *words: object) -> subprocess.Popen:
        """Start `silotune federation …` or another command in the background; its output goes to `<name>.log`."""
        command = [sys.executable, "-m", "silotune", *map(str, words)] if words[0] == "federation" else list(words)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.begun[name] = subprocess.Popen(
                [*self.inside(name), *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.environment(), start_new_session=True, cwd=self.folder, preexec_fn=end_with_parent,
            )  # fmt: skip
        return self.begun[name]

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def up(self) -> None:
        """Start the SuperLink, and nginx in front of it with the configuration of `deploy/`."""
        self.begin("up", "federation", "up", self.link)
        self.until(lambda: "SuperLink on" in self.said("up"), "up")
        self.begin_proxy()

    def begin_proxy(self, **changes: str) -> None:
        """Start nginx with the configuration of `deploy/`; `changes` are made by the first words of a line."""
        text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
        for old, new in (
            ("listen 443 ssl", f"listen {self.interface}:{self.proxy} ssl"),
            ("127.0.0.1:8443", f"127.0.0.1:{self.port}"),
            ("/etc/silotune/tls", str(self.tls)),
            ("/run/nginx-silotune.pid", str(self.folder / "nginx.pid")),
            ("coordinator.example.org", self.host),
        ):
            assert old in text
            text = text.replace(old, new)
        for old, new in changes.items():
            text, count = re.subn(rf"^ *# {old} .*$", new, text, flags=re.MULTILINE)
            assert count == 1
        (self.folder / "nginx.conf").write_text(text, encoding="utf-8")
        words = [NGINX, "-p", str(self.folder), "-c", str(self.folder / "nginx.conf"), "-e", "stderr"]
        subprocess.run([*self.inside("nginx"), *words, "-t"], check=True, capture_output=True, timeout=60)
        self.begin("nginx", *words, "-g", "daemon off;")
        self.until(self.reachable, "nginx")

    def reachable(self) -> bool:
        return listens(self.proxy)

    def until(self, condition, name: str) -> None:
        """Wait for a condition; fails if a process ends meanwhile."""
        end = time.monotonic() + LONGEST
        while not condition():
            assert self.begun[name].poll() is None, self.said(name)
            assert time.monotonic() < end, self.said(name)
            time.sleep(0.2)

    def processes(self) -> list[int]:
        living = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if int(entry.name) != os.getpid() and f"TEST_FOLDER={self.folder}".encode() in environment.split(b"\0"):
                living.append(int(entry.name))
        return living

    def end(self) -> None:
        """End all processes that are left."""
        for process in self.begun.values():
            if process.poll() is None:
                process.terminate()
        for process in self.begun.values():
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=30)
        for left in self.processes():
            try:
                os.kill(left, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def environment(self) -> dict[str, str]:
        flower = dict(ENVIRONMENT) | {"FLWR_HOME": str(self.folder / "flwr")}
        return os.environ | flower | {"TEST_FOLDER": str(self.folder), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def may_have_namespaces() -> bool:
    if IP is None or os.geteuid() != 0:
        return False
    probe = f"st{os.getpid()}-probe"
    created = subprocess.run([IP, "netns", "add", probe], capture_output=True, check=False).returncode == 0
    return created and subprocess.run([IP, "netns", "del", probe], check=False).returncode == 0


def ip(space: str, words: str) -> None:
    """Change the network of a namespace."""
    subprocess.run([str(IP), "-n", space, *words.split()], check=True, capture_output=True, timeout=60)


def make_namespace(space: str) -> None:
    """Make a network namespace with a loopback."""
    subprocess.run([str(IP), "netns", "add", space], check=True, capture_output=True, timeout=60)
    ip(space, "link set lo up")


def make_network(coordinator: str, silos: Sequence[str], net: str) -> None:
    """Make namespaces and connect them by a bridge in the coordinator's, which has the net's first address."""
    for space in (coordinator, *silos):
        make_namespace(space)
    for words in ("link add bridge type bridge", f"addr add {net}.1/24 dev bridge", "link set bridge up"):
        ip(coordinator, words)
    for number, silo in enumerate(silos):
        ip(silo, f"link add net type veth peer to{number} netns {coordinator}")
        ip(silo, f"addr add {net}.{11 + number}/24 dev net")
        ip(silo, "link set net up")
        ip(coordinator, f"link set to{number} master bridge up")


def silo_files(deployed: Deployed, config: Config) -> dict[str, Path]:
    """Write a folder for each silo with its rows, key and configuration."""
    rows = local_configs(config, deployed.folder / "source")
    silos = {}
    for (name, local), port in zip(rows.items(), free_ports(len(rows)), strict=True):
        home = deployed.folder / name
        home.mkdir()
        key(home / "key")
        shutil.move(local.rows, home / "rows")
        shutil.copy(deployed.tls / "ca.pem", home / "ca.pem")
        tree = {"name": name, "folder": "state", "rows": "rows", "share": ALL, "backbone": config.backbone.name}
        tree |= {"policy": dict(REHEARSAL), "approval": "policy", "superlink": deployed.address}
        tree |= {"root_certificates": "ca.pem", "private_key": "key", "port": port}
        silos[name] = deployed.write(f"{name}/silo.yaml", tree)
    return silos


def plain(deployed: Deployed, config: Config) -> dict[str, Path]:
    """Write the files of a coordinator and its silos without TLS and keys, all on loopback."""
    deployed.link = deployed.write("plain.yaml", {"folder": "c", "port": deployed.port, "insecure": True})
    deployed.proxy = deployed.port
    files = silo_files(deployed, config)
    for file in files.values():
        text = file.read_text(encoding="utf-8").replace("root_certificates: ca.pem\nprivate_key: key\n", "")
        file.write_text(text.replace("localhost:", "127.0.0.1:") + "insecure: true\n", encoding="utf-8")
    deployed.begin("up", "federation", "up", deployed.link)
    deployed.until(lambda: "SuperLink on" in deployed.said("up"), "up")
    return files
