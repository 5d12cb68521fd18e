"""Real processes with TLS, node keys and nginx in front: who is let in, and what passes."""

from __future__ import annotations

import shutil
import ssl
from base64 import b64encode
from functools import partial
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from silotune.deploy.doctor import Finding, examine_silo
from silotune.deploy.enrollment import ask
from silotune.deploy.settings import NodeSettings
from silotune.errors import InputError
from tests.support.deployed import NGINX, authority, key

pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed"),
]


def client(deployed, port=None) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(deployed.tls / "ca.pem"))
    return httpx.Client(base_url=f"https://localhost:{port or deployed.proxy}", verify=context, timeout=120)


def signed(private: Path) -> tuple[bytes, dict[str, str]]:
    """A node's public key, and the headers by which its SuperNode proves that it has the private one."""
    loaded = serialization.load_ssh_private_key(private.read_bytes(), None)
    public, stamp = public_key_to_bytes(loaded.public_key()), now().isoformat()
    return public, {
        TIMESTAMP_HEADER: stamp,
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(loaded, stamp.encode())).decode(),
    }


def registration(deployed, public: Path) -> Finding:
    """What a silo's doctor says of its key."""
    way = {"root_certificates": str(deployed.tls / "ca.pem"), "private_key": str(public.with_suffix(""))}
    way |= {"folder": str(deployed.folder / "n"), "socket": str(deployed.folder / "w.sock")}
    node = NodeSettings(name="north", superlink=deployed.address, **way)
    return next(finding for finding in examine_silo(node) if finding.check == "registration")


def test_only_the_node_api_passes_and_only_for_admitted_keys(deployed):
    """One SuperLink, so that the short suite stays short."""
    deployed.up()
    north, stranger = key(deployed.folder / "north"), key(deployed.folder / "stranger")
    media = {"content-type": PROTOBUF_MEDIA_TYPE}
    with client(deployed) as proxy, client(deployed, deployed.port) as behind:
        # paths
        assert proxy.get("/health").status_code == 200
        for path in (
            "/", "/docs", "/openapi.json", "/v1", "/v1/fleet", "/v1/fleet/", "/health/", "/health?x",
            "/v1/control/list-runs", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task",
            "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/..%2fcontrol/list-runs",
            "/v1/fleet/pull-messages/../../control/list-runs", "//v1/control/list-runs", "/v1/fleet/x%00",
            "/V1/CONTROL/list-runs", "/v1/fleet/pull-messages?x=/v1/control/list-runs", "/v1%2fcontrol/list-runs",
        ):  # fmt: skip
            for method in ("GET", "POST"):
                url = httpx.URL(f"https://localhost:{deployed.proxy}").copy_with(raw_path=path.encode())
                answer = proxy.request(method, url, headers=media)
                assert answer.status_code in (400, 403, 404, 405), (method, path, answer.status_code)
                assert b"uvicorn" not in answer.headers.get("server", "").encode(), path
        assert proxy.get("/v1/fleet/pull-messages").status_code == 405
        # what is closed by the proxy is open behind it: that is why it is there
        assert behind.post("/v1/control/list-runs", headers=media).status_code == 200
        # keys
        done = deployed.command("federation", "admit", deployed.link, "north", north)
        assert done.returncode == 0, done.stderr
        node = done.stdout.split()[-1]

        def activate(public: bytes, headers: dict[str, str]) -> httpx.Response:
            body = ActivateNodeRequest(public_key=public, heartbeat_interval=30).SerializeToString()
            return proxy.post("/v1/fleet/activate-node", content=body, headers=headers | media)

        ours, proof = signed(north.with_suffix(""))
        theirs, other = signed(stranger.with_suffix(""))
        assert activate(ours, proof).status_code == 200
        doctor = partial(registration, deployed)
        assert (doctor(north).state, doctor(stranger).state) == ("ok", "problem")
        assert deployed.online() == ["north"], "a doctor changes nothing"
        for public, headers in (
            (ours, {}),  # no proof
            (theirs, other),  # a key that nobody admitted
            (ours, other),  # an admitted key with another's proof
            (ours, proof | {FLEET_HTTP_SIGNATURE_HEADER: other[FLEET_HTTP_SIGNATURE_HEADER]}),
            (ours, proof | {TIMESTAMP_HEADER: "2020-01-01T00:00:00+00:00"}),
        ):
            answer = activate(public, headers)
            assert 400 <= answer.status_code < 500
            assert node not in answer.text
            assert b"north" not in answer.content
        pull = PullMessagesRequest()
        pull.node.node_id = int(node)
        for headers in ({}, other):
            answer = proxy.post("/v1/fleet/pull-messages", content=pull.SerializeToString(), headers=headers | media)
            assert answer.status_code == 401
        # expelled: the same proof is worth nothing
        assert deployed.command("federation", "expel", deployed.link, "north").returncode == 0
        assert doctor(north).state == "problem"
        assert doctor(north).detail == f"coordinator {deployed.address}: knows no such key"
        assert 400 <= activate(*signed(north.with_suffix(""))).status_code < 500
    # a coordinator with a self-made certificate: a silo ends before it sends anything
    authority(deployed.folder / "other")
    with pytest.raises(InputError, match="its certificate is not one that the authority vouches for"):
        ask(deployed.address, deployed.folder / "other" / "ca.pem", "GET", "/health")


def test_the_proxy_admits_only_the_addresses_that_it_names(deployed):
    deployed.begin_proxy(allow="allow 127.0.0.9; deny all;")
    context = ssl.create_default_context(cafile=str(deployed.tls / "ca.pem"))
    for address, status in (("127.0.0.1", 403), ("127.0.0.9", 502)):  # nothing is behind it
        transport = httpx.HTTPTransport(verify=context, local_address=address)
        with httpx.Client(transport=transport, timeout=60) as silo:
            assert silo.get(f"https://localhost:{deployed.proxy}/health").status_code == status
