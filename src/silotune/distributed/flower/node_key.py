"""Asks the SuperLink whether it knows a node's key, without anything that a running node would notice."""

from __future__ import annotations

from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from silotune.errors import SilotuneError


def find_key(address: str, authority: Path, private_key: Path) -> tuple[bool, str]:
    """Return whether the SuperLink knows the key, and the same in words.

    The request asks for a heartbeat of 0 seconds. The SuperLink refuses that only after it has looked up the key, so
    nothing is activated.

    Raises:
        SilotuneError: the key is of another type, or the answer is another, such as that this machine's clock is off.
    """
    key = load_ssh_private_key(private_key.read_bytes(), None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise SilotuneError(f"{private_key}: not a key that `silo join` made; Flower's are on an elliptic curve")
    signs = [NodeAuthHttpInterceptor(key, key.public_key())]
    request = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=0)
    try:
        with FleetHttpClient.from_server_address(address, False, authority.read_bytes(), signs) as client:
            client.ActivateNode(request)
    except httpx.HTTPError as error:
        reply = FlowerError.from_json(error.response.text) if isinstance(error, httpx.HTTPStatusError) else None
        if reply is not None and reply.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            return False, f"coordinator {address}: knows no such key"
        if reply is None or reply.code != ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
            raise SilotuneError(f"coordinator {address}: does not say whether it knows the key ({error})") from error
    return True, f"coordinator {address}: knows this silo's key"
