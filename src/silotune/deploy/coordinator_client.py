"""What a party asks the coordinator's proxy over TLS, with the authority of its invitation: `register` a key, `ask`."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any

from silotune.deploy.enrollment import PATH
from silotune.deploy.invitations import Invitation
from silotune.distributed.protocol.frames import PROTOCOL
from silotune.errors import InputError, SilotuneError
from silotune.version import __version__

PATIENCE = 300.0
"""Seconds for the coordinator's answer: registering a key takes Flower some ten."""


def register(invitation: Invitation, public: bytes) -> None:
    """Send the public key and the token to the coordinator.

    Raises:
        SilotuneError: it does not answer.
    """
    fields = {"silo": invitation.silo, "token": invitation.token, "public_key": public.decode()}
    status, answer = ask(invitation.superlink, invitation.ca, "POST", PATH, fields)
    if status == 404:
        raise InputError(
            f"coordinator {invitation.superlink}: takes no enrollment; give --no-register, and it silo.key.pub"
        )
    if status in (400, 403, 411, 413):
        raise InputError(f"coordinator {invitation.superlink}: {answer.get('error', status)}")
    if status != 200:
        reason = answer.get("error", f"HTTP status {status}; its SuperLink may not run")
        raise SilotuneError(f"coordinator {invitation.superlink}: {reason}; run the same command again later")
    if (answer.get("protocol"), answer.get("version")) != (PROTOCOL, __version__):
        raise InputError(
            f"coordinator {invitation.superlink}: has silotune {answer.get('version')} (protocol "
            f"{answer.get('protocol')}), this machine {__version__} ({PROTOCOL}); install the same and run this again"
        )


def ask(
    address: str,
    authority: str,
    method: str,
    path: str,
    fields: dict[str, Any] | None = None,
    seconds: float = PATIENCE,
) -> tuple[int, dict[str, Any]]:
    """Ask the coordinator's proxy, over TLS with its own authority.

    Args:
        address: HOST:PORT.
        authority: certificates, PEM.
        method: `GET` or `POST`.
        path: of the request.
        fields: sent as JSON.
        seconds: the longest wait.

    Returns:
        HTTP's status, and the answer's fields; those of its headers are under `headers`.

    Raises:
        SilotuneError: it does not answer.
    """
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    context = ssl.create_default_context(cadata=authority)
    connection = http.client.HTTPSConnection(bare, int(port), timeout=seconds, context=context)
    try:
        body = None if fields is None else json.dumps(fields)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        content = reply.read(65536)
        headers = {name.lower(): value for name, value in reply.getheaders()}
    except ssl.SSLCertVerificationError as error:
        raise InputError(
            f"coordinator {address}: its certificate is not one that the invitation's authority vouches for "
            f"({error.verify_message})"
        ) from error
    except ssl.SSLError as error:
        raise InputError(f"coordinator {address}: TLS failed ({error.reason}); is the name right?") from error
    except (OSError, http.client.HTTPException) as error:
        raise SilotuneError(f"coordinator {address}: does not answer ({error})") from error
    finally:
        connection.close()
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        parsed = None
    return reply.status, {"headers": headers} | (parsed if isinstance(parsed, dict) else {})
