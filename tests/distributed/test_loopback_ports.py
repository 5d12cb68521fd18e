"""Who reaches the ports of SuperLink and SuperNode on their machine, and the rule that keeps other users out."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.deployed import IP, make_namespace, may_have_namespaces

PAGE = (Path(__file__).parents[2] / "docs" / "deployment-reference.md").read_text(encoding="utf-8")
NFT = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
PORTS = (8443, 9094)
OTHER = 12345
"""A user whom the rule does not name."""

LISTENS = "import socket, time; s = [socket.create_server(('127.0.0.1', p)) for p in {ports}]; time.sleep(600)"
CONNECTS = """
import encodings.idna, os, socket  # the user may not be able to read Python's files
os.setgid({user}); os.setuid({user})
socket.create_connection(("127.0.0.1", {port}), 2)
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not may_have_namespaces(), reason="network namespaces need root and `ip`"),
]


@pytest.fixture
def machine():
    """`machine(words)` runs a command on a machine whose ports are taken; returns its exit code and its errors."""
    space = f"sl{time.monotonic_ns() % 10**6}"
    make_namespace(space)
    inside = [IP, "netns", "exec", space]
    listener = subprocess.Popen([*inside, sys.executable, "-c", LISTENS.format(ports=PORTS)])

    def command(*words):
        done = subprocess.run([*inside, *words], capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stderr

    try:
        until = time.monotonic() + 60
        while any(reaches(command, 0, port) for port in PORTS) is False and time.monotonic() < until:
            time.sleep(0.2)
        yield command
    finally:
        listener.kill()
        listener.wait()
        subprocess.run([IP, "netns", "del", space], check=False)


def reaches(command, user, port):
    """Whether a user gets a connection."""
    return command(sys.executable, "-c", CONNECTS.format(user=user, port=port))[0] == 0


def test_other_users_reach_what_listens_on_loopback(machine):
    for port in PORTS:
        assert reaches(machine, 0, port)
        assert reaches(machine, OTHER, port)


@pytest.mark.skipif(NFT is None, reason="nft is not installed")
def test_the_rule_of_the_page_keeps_other_users_out(machine):
    (rule,) = re.findall(r"`nft (add rule .*?)`", PAGE, re.S)
    for words in (
        "add table inet filter",
        "add chain inet filter output { type filter hook output priority 0 ; }",
        rule,
    ):
        code, problem = machine(str(NFT), " ".join(words.split()).replace("silotune, www-data", "1, 2"))
        assert code == 0, problem
    assert reaches(machine, 0, 8443)
    assert not reaches(machine, OTHER, 8443)
