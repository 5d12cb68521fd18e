"""Registers, removes and lists silos' public keys at the SuperLink (`admit`, `expel`); logs who did it.

The SuperLink does not list the names of its nodes, so `<folder>/nodes.json` keeps them: one key per silo.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from silotune.config.validators import NAME_RULE, is_name
from silotune.core.chained_log import ChainedLog
from silotune.core.clock import current_user
from silotune.core.files import write_text
from silotune.deploy.party_configs import CoordinatorSettings
from silotune.distributed.flower.commands import ENVIRONMENT, run_flwr, write_home
from silotune.errors import InputError, SilotuneError

PREFIX = "silo-"
"""Prefix of a silo's name at the SuperLink; `coordinator/dispatcher.py` compares it with the hello."""


def flwr_environment(config: CoordinatorSettings) -> dict[str, str]:
    """Return the environment in which Flower's commands connect to this coordinator's SuperLink."""
    home = write_home(Path(config.folder) / "flwr", config.address, config.ca)
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    return {**os.environ, **ENVIRONMENT, "PATH": path, "FLWR_HOME": str(home)}


def register_node(config: CoordinatorSettings, silo: str, key: Path) -> str:
    """Register a silo's public key (`silotune federation admit`).

    Args:
        config: the coordinator's settings.
        silo: the silo's name.
        key: file of the public key.

    Returns:
        The node's id.

    Raises:
        SilotuneError: the SuperLink did not accept it.
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
    output = _flwr_supernode(
        config, f"silo {silo!r} was not admitted", "register", str(key), "--name", f"{PREFIX}{silo}"
    )
    node = str(output["node-id"])
    _write_nodes(config, {**nodes, silo: node})
    record_decision(config, "admitted", silo=silo, node=node)
    return node


def unregister_node(config: CoordinatorSettings, silo: str) -> str:
    """Unregister a silo's key (`silotune federation expel`); its node gets no further replies.

    Args:
        config: the coordinator's settings.
        silo: the silo's name.

    Returns:
        The node's id.

    Raises:
        SilotuneError: the SuperLink did not unregister it.
    """
    nodes = registered_nodes(config)
    if silo not in nodes:
        raise InputError(f"silo {silo!r}: not admitted; admitted: {', '.join(sorted(nodes)) or 'none'}")
    node = nodes.pop(silo)
    _flwr_supernode(config, f"silo {silo!r} was not expelled", "unregister", node)
    _write_nodes(config, nodes)
    record_decision(config, "expelled", silo=silo, node=node)
    return node


def record_decision(config: CoordinatorSettings, kind: str, **fields: str) -> None:
    """Record what the coordinator's operator did (`audit.jsonl` in its folder), and who it was."""
    ChainedLog(Path(config.folder)).append({"kind": kind, **fields, "user": current_user()})


def registered_nodes(config: CoordinatorSettings) -> dict[str, str]:
    """Return the id of each registered silo's node."""
    path = _nodes_file(config)
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
        return {str(silo): str(node) for silo, node in ids.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: damaged ({error})") from error


def node_statuses(config: CoordinatorSettings) -> dict[str, str]:
    """Return the status of each node in Flower's words, by silo (or by id if it was not registered here).

    Raises:
        SilotuneError: the SuperLink does not answer.
    """
    names = {node: silo for silo, node in registered_nodes(config).items()}
    listed = _flwr_supernode(config, "nodes", "list").get("nodes", [])
    states = {names.get(str(node["node-id"]), f"node {node['node-id']}"): str(node["status"]) for node in listed}
    return {name: state for name, state in states.items() if state != "unregistered"}


def _flwr_supernode(config: CoordinatorSettings, failure: str, verb: str, *arguments: str) -> dict[str, Any]:
    """Run `flwr supernode VERB …` and return its JSON output.

    Raises:
        SilotuneError: it failed.
    """
    command = ["flwr", "supernode", verb, *arguments[:1], "silotune", *arguments[1:], "--format", "json"]
    process = run_flwr(command, flwr_environment(config), failure)
    try:
        output = dict(json.loads(process.stdout))
    except (ValueError, TypeError):
        output = {"error-message": f"{process.stdout} {process.stderr}"}
    if output.get("success") is not True:
        reason = " ".join(str(output.get("error-message", output)).split())
        raise SilotuneError(f"{failure}: {reason[-300:]}")
    return output


def _nodes_file(config: CoordinatorSettings) -> Path:
    return Path(config.folder) / "nodes.json"


def _write_nodes(config: CoordinatorSettings, nodes: dict[str, str]) -> None:
    write_text(_nodes_file(config), json.dumps(nodes, indent=1, sort_keys=True) + "\n")
