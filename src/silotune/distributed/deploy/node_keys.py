"""Whose node is let in: silos' keys at the SuperLink, through Flower's own commands.

The SuperLink does not list the names that it knows nodes by, so `<folder>/nodes.json` keeps them: one key per silo.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from silotune.config.validators import NAME_RULE, is_name
from silotune.core.files import write_text
from silotune.distributed.deploy.party_configs import CoordinatorSettings
from silotune.distributed.flower.commands import ENVIRONMENT, run_flwr, write_home
from silotune.errors import InputError, SilotuneError

PREFIX = "silo-"
"""What the SuperLink knows a silo's node by: this and the silo's name (`rollcall.py` compares them)."""


def flwr_environment(config: CoordinatorSettings) -> dict[str, str]:
    """What Flower's commands see, so that they talk to this coordinator's SuperLink."""
    home = write_home(Path(config.folder) / "flwr", config.address, config.ca)
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    return {**os.environ, **ENVIRONMENT, "PATH": path, "FLWR_HOME": str(home)}


def register_node(config: CoordinatorSettings, silo: str, key: Path) -> str:
    """Let a silo's public key in; the node's id.

    Raises:
        InputError: no such name or key, or the silo has a key already.
        SilotuneError: the SuperLink did not take it.
    """
    if not is_name(silo):
        raise InputError(f"silo {silo!r} cannot be a name; allowed: {NAME_RULE}")
    if silo.startswith(PREFIX):
        raise InputError(f"silo {silo!r}: must not begin with {PREFIX!r}: it could be taken for another silo's node")
    if not key.is_file():
        raise InputError(f"key {key}: no such file; give the public key (….pub) of `ssh-keygen -t ecdsa -b 384`")
    if "PRIVATE" in key.read_text(encoding="utf-8", errors="replace"):
        raise InputError(f"key {key}: is a private key, which stays with the silo; give the public one (….pub)")
    nodes = registered_nodes(config)
    if silo in nodes:
        raise InputError(f"silo {silo!r}: is node {nodes[silo]} already; `silotune federation expel` takes it out")
    said = _ask(config, f"silo {silo!r} was not admitted", "register", str(key), "--name", f"{PREFIX}{silo}")
    node = str(said["node-id"])
    _keep(config, {**nodes, silo: node})
    return node


def unregister_node(config: CoordinatorSettings, silo: str) -> str:
    """Take a silo's key out; the node's id. Its node gets no further answer.

    Raises:
        InputError: the silo has no key here.
        SilotuneError: the SuperLink did not do it.
    """
    nodes = registered_nodes(config)
    if silo not in nodes:
        raise InputError(f"silo {silo!r}: not admitted; admitted: {', '.join(sorted(nodes)) or 'none'}")
    node = nodes.pop(silo)
    _ask(config, f"silo {silo!r} was not expelled", "unregister", node)
    _keep(config, nodes)
    return node


def registered_nodes(config: CoordinatorSettings) -> dict[str, str]:
    """Silo → its node's id.

    Raises:
        InputError: the file is damaged.
    """
    path = _file(config)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(silo): str(node) for silo, node in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: damaged ({error})") from error


def node_statuses(config: CoordinatorSettings) -> dict[str, str]:
    """Silo (or a node's id, where it was not admitted here) → whether it is online, in Flower's words.

    Raises:
        SilotuneError: the SuperLink does not answer.
    """
    names = {node: silo for silo, node in registered_nodes(config).items()}
    listed = _ask(config, "nodes", "list").get("nodes", [])
    found = {names.get(str(node["node-id"]), f"node {node['node-id']}"): str(node["status"]) for node in listed}
    return {name: state for name, state in found.items() if state != "unregistered"}


def _ask(config: CoordinatorSettings, failure: str, verb: str, *words: str) -> dict[str, Any]:
    """One of `flwr supernode …`."""
    command = ["flwr", "supernode", verb, *words[:1], "silotune", *words[1:], "--format", "json"]
    done = run_flwr(command, flwr_environment(config), failure)
    try:
        said = dict(json.loads(done.stdout))
    except (ValueError, TypeError):
        said = {"error-message": f"{done.stdout} {done.stderr}"}
    if said.get("success") is not True:
        reason = " ".join(str(said.get("error-message", said)).split())
        raise SilotuneError(f"{failure}: {reason[-300:]}")
    return said


def _file(config: CoordinatorSettings) -> Path:
    return Path(config.folder) / "nodes.json"


def _keep(config: CoordinatorSettings, nodes: dict[str, str]) -> None:
    write_text(_file(config), json.dumps(nodes, indent=1, sort_keys=True) + "\n")
