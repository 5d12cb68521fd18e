"""From nothing to an answer at a silo, by the commands of docs/deployment.md: machines with their own /etc, users.

Every party is a network namespace with its own /etc, /var/lib, /run and /srv; nginx stands before the coordinator. What
systemd would start is read from the installed units and started as their users. Prints the minutes and the commands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.deployed import IP, NGINX, make_network, may_have_namespaces

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")
HOST, NET = "coordinator.example.org", "10.213.78"
SILOS = ("north", "south", "east")
WORKER, NODE = "silotune-worker", "silotune-node"
LONGEST = 900


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
    pytest.mark.skipif(not may_have_namespaces(), reason="network namespaces need root and `ip`"),
]


def commands_of(section: str) -> list[str]:
    """The commands in a section's blocks, as an operator types them."""
    text = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    lines = re.sub(r"\\\n\s*", "", "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S))).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


@dataclass
class Machine:
    """A party: `typed` commands are an operator's, `begin` is systemd's."""

    name: str
    root: Path
    typed_commands: list[str] = field(default_factory=list)
    begun: dict[str, subprocess.Popen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for folder in ("etc", "lib", "run", "srv", "home", "hidden"):
            (self.root / folder).mkdir(parents=True)
        subprocess.run(["cp", "-a", "/etc/.", self.root / "etc"], check=True)
        shutil.rmtree(self.root / "etc" / "silotune", ignore_errors=True)
        hosts = f"127.0.0.1 localhost\n{NET}.1 {HOST}\n"
        (self.root / "etc" / "hosts").write_text(hosts)
        (self.root / "lib" / "nginx").mkdir()

    @property
    def space(self) -> str:
        return f"{self.root.parent.name}-{self.name}"

    def inside(self, words: list[str]) -> list[str]:
        mounts = [("etc", "/etc"), ("lib", "/var/lib"), ("run", "/run"), ("srv", "/srv")]
        script = " && ".join(f"mount --bind {self.root / source} {target}" for source, target in mounts)
        if sys.base_prefix.startswith("/root/"):  # a Python that other users of this machine cannot reach
            script += f" && mount --rbind /root {self.root / 'hidden'} && mount -t tmpfs -o mode=755 none /root"
            python = Path(sys.base_prefix)
            kept = self.root / "hidden" / python.relative_to("/root")
            script += f" && mkdir -p {python} && mount --bind {kept} {python}"
        script += f' && cd {self.root / "home"} && exec "$@"'
        return [str(IP), "netns", "exec", self.space, "sh", "-c", script, "sh", *words]

    def environment(self) -> dict[str, str]:
        program = Path(sys.executable).parent
        kept = {key: os.environ[key] for key in ("PYTHONPATH", "OMP_NUM_THREADS", "LANG") if key in os.environ}
        path = f"{program}:/usr/sbin:/usr/bin:/sbin:/bin"
        return kept | {"PATH": path, "HF_HUB_OFFLINE": "1", "TEST_MACHINE": self.space, "COLUMNS": "200"}

    def typed(self, line: str, counted: bool = True, code: int = 0, answer: str = "") -> str:
        """Run a command line as root, as `sudo` would; `answer` is typed when it asks."""
        if counted:
            self.typed_commands.append(line)
        line = re.sub(r"^sudo -u (\S+) ", r"runuser -u \1 -- ", line.strip())
        done = subprocess.run(self.inside(["sh", "-c", line.removeprefix("sudo ")]), capture_output=True, text=True,
                              input=answer, timeout=LONGEST, env=self.environment())  # fmt: skip
        assert done.returncode == code, f"{self.name}: {line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def systemd(self, unit: str) -> None:
        """Start an installed unit's process as its user, with its folders under /run and /var/lib."""
        text = (self.root / "etc/systemd/system" / f"{unit}.service").read_text()
        keys = dict(re.findall(r"^(\w+)=(.*)$", text, re.M))
        command = keys["ExecStart"].replace("/usr/sbin/nginx", str(NGINX))
        if "User" in keys:
            user, group = keys["User"], keys["Group"]
            for kind, parent in (("RuntimeDirectory", "/run"), ("StateDirectory", "/var/lib")):
                if kind in keys:
                    folder = f"{parent}/{keys[kind]}"
                    make = f"install -d -o {user} -g {group} -m {keys[f'{kind}Mode']} {folder}"
                    self.typed(make, counted=False)
            command = f"umask {keys['UMask']}; exec setpriv --reuid {user} --regid {group} --clear-groups {command}"
        with (self.root / f"{unit}.log").open("ab") as log:
            self.begun[unit] = subprocess.Popen(
                self.inside(["bash", "-c", command]), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.environment(), start_new_session=True,
            )  # fmt: skip

    def said(self, unit: str) -> str:
        return (self.root / f"{unit}.log").read_text(errors="replace")

    def end(self) -> None:
        """End every process of this machine."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    ours = f"TEST_MACHINE={self.space}".encode() in (entry / "environ").read_bytes().split(b"\0")
                    if ours:
                        os.kill(int(entry.name), number)
                except OSError:
                    continue
            time.sleep(3 if number == signal.SIGTERM else 0)
        subprocess.run([IP, "netns", "del", self.space], check=False, capture_output=True)


@pytest.fixture
def machines() -> Iterator[dict[str, Machine]]:
    with tempfile.TemporaryDirectory(prefix="sn", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        made: dict[str, Machine] = {}
        try:
            for party in ("coordinator", *SILOS):
                made[party] = Machine(party, folder / party)
            make_network(made["coordinator"].space, [made[silo].space for silo in SILOS], NET)
            yield made
        finally:
            for machine in made.values():
                machine.end()


def wait(condition, what: str, machine: Machine) -> None:
    until = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < until, what + "".join(machine.said(unit) for unit in machine.begun)
        time.sleep(1)


def online_silos(status: str) -> set[str]:
    return {silo["silo"] for silo in json.loads(status)["silos"] if silo["online"]}


def test_three_silos_from_nothing(machines, capsys):
    coordinator = machines["coordinator"]
    for number, silo in enumerate(SILOS):
        folder = machines[silo].root / "srv" / "silotune"
        folder.mkdir()
        words = [("good", "fine praised liked"), ("bad", "poor blamed hated")]
        rows = [f"{text} number {row} of {silo},{label}" for row in range(250 + number) for label, text in words]
        (folder / "reviews.csv").write_text("review,opinion\n" + "\n".join(rows) + "\n")
    begin = time.monotonic()
    # 1. the coordinator
    setup, invitation = commands_of("1. The coordinator")
    assert "federation init" in setup
    said = coordinator.typed(setup)
    fingerprint = re.search(r"([0-9A-F]{2}:){31}[0-9A-F]{2}", said)[0]
    coordinator.systemd("silotune-coordinator")
    coordinator.systemd("silotune-proxy")
    wait(lambda: "SuperLink on" in coordinator.said("silotune-coordinator"), "up", coordinator)
    coordinator.typed(invitation.replace("north south", " ".join(SILOS)))
    # 2. the silos
    (join,) = commands_of("2. A silo")
    for silo in SILOS:
        machine = machines[silo]
        shutil.copy(coordinator.root / "home" / f"{silo}.invite", machine.root / "home")  # by another channel
        said = machine.typed(join.replace("north", silo).replace("chmod 640", "true"))
        assert fingerprint in said
        machine.typed(re.search(r"chown -R .*", said)[0])
        machine.systemd("silotune-worker")
        wait(lambda at=machine: (at.root / "run/silotune/worker.sock").exists(), "worker", machine)
        machine.systemd("silotune-node")
    status = "sudo -u silotune silotune federation status /etc/silotune/coordinator.yaml --json"
    wait(lambda: online_silos(coordinator.typed(status, counted=False)) == set(SILOS), "online", machines["north"])
    online = time.monotonic() - begin
    # users and modes
    for silo in SILOS:
        etc, lib = machines[silo].root / "etc", machines[silo].root / "lib"
        users = dict(line.split(":")[:3:2] for line in (etc / "passwd").read_text().splitlines())
        private = [etc / "silotune" / "silo.key", etc / "silotune" / "silo.yaml", lib / WORKER, lib / NODE]
        modes = {path.name: (stat.S_IMODE(path.stat().st_mode), str(path.stat().st_uid)) for path in private}
        assert modes == {
            "silo.key": (0o600, users["silotune-node"]),
            "silo.yaml": (0o600, users["silotune-worker"]),
            "silotune-worker": (0o700, users["silotune-worker"]),
            "silotune-node": (0o700, users["silotune-node"]),
        }
        machines[silo].typed("sudo -u silotune-node test -r /etc/silotune/silo.yaml", counted=False, code=1)
        machines[silo].typed("sudo -u silotune-worker test -r /etc/silotune/silo.key", counted=False, code=1)
        # worker and node are apart: who runs the coordinator's app reaches the socket, and no row
        machines[silo].typed("sudo -u silotune-worker test -r /srv/silotune/reviews.csv", counted=False)
        machines[silo].typed("sudo -u silotune-node test -r /srv/silotune/reviews.csv", counted=False, code=1)
        machines[silo].typed("sudo -u silotune-node ls /var/lib/silotune-worker", counted=False, code=2)
    # 3. the run, which the silos' operators approve
    start, approve = commands_of("3. A run")
    pending = "sudo -u silotune-worker silotune silo pending"
    start = start.replace("[north,south]", "[north,south,east]").replace("run.yaml", "demo rounds=2 train.batches=even")
    begun = subprocess.Popen(
        coordinator.inside(["sh", "-c", re.sub(r"^sudo -u (\S+) ", r"runuser -u \1 -- ", start)]),
        env=coordinator.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    coordinator.typed_commands.append(start)
    started = time.monotonic()
    for silo in SILOS:
        machine = machines[silo]
        wait(lambda at=machine: "no run" not in at.typed(pending, counted=False), "pending", machine)
        assert "leaves in a round" in machine.typed(approve, answer="y\n")
    events = coordinator.root / "lib/silotune/one/events.jsonl"
    wait(lambda: events.exists() and '"event": "round"' in events.read_text(), "round", coordinator)
    first = time.monotonic() - begin
    output, _ = begun.communicate(timeout=LONGEST)
    assert begun.returncode == 0, output
    run_minutes = (time.monotonic() - started) / 60
    # 4. the answer
    predict, report = commands_of("4. The answer at a silo")
    for silo in SILOS:
        (folder,) = (machines[silo].root / "lib" / WORKER).glob("*/models")
        said = json.loads(machines[silo].typed(predict.replace("3f2a…", folder.parent.name).replace("north", silo)))
        assert said["label"] in ("good", "bad")
    answered = (time.monotonic() - begin) / 60
    coordinator.typed(report)
    assert (coordinator.root / "lib/silotune/report.html").is_file()
    counts = {name: len(machine.typed_commands) for name, machine in machines.items()}
    with capsys.disabled():
        print(
            f"\nthree silos online after {online / 60:.1f} min, first round after {first / 60:.1f} min, answers after "
            f"{answered:.1f} min, {answered - run_minutes:.1f} of them beside run and approvals; typed: {counts}"
        )
    assert set(counts.values()) == {4}  # installing silotune is the fifth
    # the doctors
    doctors = commands_of("Before and after")
    for machine, line in zip((coordinator, machines["north"], machines["north"]), doctors, strict=True):
        report = json.loads(machine.typed(f"{line} --json", counted=False))
        states = {check["check"]: check["state"] for check in report["checks"]}
        assert report["ok"], report
        assert {"authority", "connection", "clock", "control API", "version", "disk"} <= states.keys()
        assert {check: state for check, state in states.items() if state != "ok"} == {}
        if "dry round" in states:
            assert "trained one step" in report["checks"][-1]["detail"]
