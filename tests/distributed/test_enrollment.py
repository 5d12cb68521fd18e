"""Setting up a federation: certificates, invitations, enrollment over TLS, a silo's files. Without Flower."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import stat
import subprocess
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from silotune.deploy import enrollment, initialize, joining
from silotune.deploy import nodes as admission
from silotune.deploy.certificates import check_public_key, fingerprint, make_node_key, names_in, public_node_key
from silotune.deploy.doctor import check_proxy, check_rows, check_secret, examine_silo
from silotune.deploy.files import TEMPLATES, filled
from silotune.deploy.joining import Answers
from silotune.deploy.nodes import Invitation, InvitationRefused, claim, note, unclaim
from silotune.deploy.settings import read_coordinator_settings, read_silo_or_node_settings
from silotune.distributed.flower.commands import free_ports
from silotune.distributed.silo.mask_work import masks_line, read_masked
from silotune.errors import InputError, SilotuneError

ROOT = Path(__file__).parents[2]


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def made(tmp_path):
    """A coordinator's folder, whose public address is that of its enrollment, without a proxy between."""
    (port,) = free_ports(1)
    files = initialize.init(tmp_path / "co", "localhost", port=9443, inner_port=port - 1)
    tree = yaml.safe_load(files.coordinator.read_text()) | {"public_address": f"localhost:{port}"}
    files.coordinator.write_text(yaml.safe_dump(tree))
    return files


@pytest.fixture
def settings(made):
    return read_coordinator_settings(made.coordinator)


@pytest.fixture
def nodes(monkeypatch, settings):
    """Stands for the SuperLink: the keys that were registered, by silo."""
    registered: dict[str, str] = {}

    def register(_settings, silo, path):
        if silo in registered:
            raise InputError(f"silo {silo!r}: is node 1 already")
        registered[silo] = path.read_text().strip()
        return "1"

    for module in (enrollment, admission):
        monkeypatch.setattr(module, "registered_nodes", lambda _settings: dict.fromkeys(registered, "1"))

    def has_key(_settings, silo, public):
        return registered.get(silo, "").split()[:2] == public.decode().split()[:2]

    monkeypatch.setattr(enrollment, "has_key", has_key)
    monkeypatch.setattr(enrollment, "register_node", register)
    monkeypatch.setattr(enrollment, "unregister_node", lambda _settings, silo: registered.pop(silo))
    return registered


@pytest.fixture
def served(settings, nodes):
    said: list[str] = []
    server = enrollment.serve_enrollment(settings, said.append)
    yield said
    server.shutdown()
    server.server_close()


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.csv"
    lines = [f"words of row {number},{'good' if number % 2 else 'bad'},p{number // 3}" for number in range(60)]
    path.write_text("review,opinion,patient\n" + "\n".join(lines) + "\n")
    return Answers(path, "trusting", ("review",), "opinion")


def invited(settings, tmp_path, silo="north", **options):
    path = tmp_path / f"{silo}-{time.monotonic_ns()}.invite"
    admission.invite(settings, silo, path, **options)
    return Invitation.read(path)


# -- init and renew ----------------------------------------------------------------------------------------------------


def test_init_makes_files_that_openssl_accepts(made, settings):
    tls = made.coordinator.parent / "tls"
    assert [mode(tls / name) for name in ("ca.key", "server.key", "ca.pem")] == [0o600, 0o600, 0o644]
    words = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", "localhost"]
    done = subprocess.run([*words, "-CAfile", tls / "ca.pem", tls / "server.pem"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        ["openssl", "x509", "-in", tls / "ca.pem", "-noout", "-fingerprint", "-sha256"], capture_output=True, text=True
    )
    assert shown.stdout.strip().endswith(f"={made.fingerprint}")
    assert names_in(tls / "server.pem") == ["localhost", "127.0.0.1"]
    proxy = made.proxy.read_text()
    assert "listen 9443 ssl" in proxy
    assert f"127.0.0.1:{settings.enrollment_port}" in proxy
    assert not any(example in proxy for example in ("coordinator.example.org", "/etc/silotune", "8443;"))
    unit = (made.coordinator.parent / "systemd" / "silotune-coordinator.service").read_text()
    assert f"federation up {made.coordinator}\n" in unit
    assert "User=silotune\n" in unit


@pytest.mark.parametrize(
    ("host", "options", "message"),
    [
        ("localhost", {}, "is already there, and nothing is overwritten"),
        ("no name", {}, "--host 'no name': is not the name of a machine"),
        ("a; rm", {}, "is not the name of a machine"),
        ("localhost", {"inner_port": 443}, "--inner-port: needs two free ports"),
    ],
)
def test_what_init_refuses(made, host, options, message):
    before = {path: path.read_bytes() for path in made.coordinator.parent.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=message):
        initialize.init(made.coordinator.parent, host, **options)
    assert before == {path: path.read_bytes() for path in made.coordinator.parent.rglob("*") if path.is_file()}


def test_certificates_are_renewed_and_the_authority_rolls_over(made, settings):
    tls = made.coordinator.parent / "tls"
    old_server, old_authority = (tls / "server.pem").read_bytes(), (tls / "ca.pem").read_bytes()
    assert initialize.renew(settings) > 360
    assert (tls / "server.pem.old").read_bytes() == old_server != (tls / "server.pem").read_bytes()
    assert mode(tls / "server.key") == mode(tls / "server.key.old") == 0o600
    assert trusts(old_authority, tls)
    initialize.renew(settings, authority=True)
    both = (tls / "ca.pem").read_bytes()
    assert both.endswith(old_authority)
    assert fingerprint(both) != fingerprint(old_authority)
    assert trusts(both, tls)  # of the old authority, still
    initialize.renew(settings)
    assert trusts(both, tls)
    assert not trusts(old_authority, tls)
    (tls / "ca.key").write_bytes((tls / "server.key").read_bytes())
    with pytest.raises(InputError, match="the authority's key does not belong to its certificate"):
        initialize.renew(settings)
    (tls / "ca.key").unlink()
    with pytest.raises(InputError, match=r"--key .*ca\.key: cannot be read"):
        initialize.renew(settings)


def trusts(authority, tls):
    """Whether a client with this authority accepts the server."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tls / "server.pem", tls / "server.key")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cadata=authority.decode())
    one = client.wrap_bio(back, there, server_hostname="localhost")
    other = server.wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for end in (one, other):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
    return one.version() is not None


# -- invitations -------------------------------------------------------------------------------------------------------


def test_an_invitation_is_secret_and_only_its_hash_stays(settings, tmp_path, nodes):
    path = tmp_path / "north.invite"
    made = admission.invite(settings, "north", path)
    assert mode(path) == 0o600
    assert made.token.encode() not in (Path(settings.folder) / "records.db").read_bytes()
    assert len(made.token) >= 43  # 256 bits
    assert Invitation.read(path) == made


def test_what_cannot_be_invited(settings, tmp_path, nodes):
    nodes["south"] = "key"
    taken = tmp_path / "there.invite"
    taken.write_text("")
    for silo, path, options, message in [
        ("../north", "a", {}, "cannot be a name"),
        ("silo-x", "a", {}, "not beginning with 'silo-'"),
        ("south", "a", {}, "is admitted already; --replace"),
        ("north", taken, {}, "is already there"),
        ("north", "a", {"days": 0}, "--days 0: allowed"),
    ]:
        with pytest.raises(InputError, match=message):
            admission.invite(settings, silo, tmp_path / path, **options)
    bare = settings.model_copy(update={"public_address": None})
    with pytest.raises(InputError, match="set public_address"):
        admission.invite(bare, "north", tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expires": "2020-01-01T00:00:00+00:00"}, "expired 2020"),
        ({"expires": "soon"}, "expired soon"),
        ({"fingerprint": "00"}, "not that of its fingerprint"),
        ({"silo": "../x"}, "is damaged"),
        ({"token": 1}, "is damaged"),
        ({"more": 1}, "is damaged"),
        ({"invitation": 2}, "is damaged"),
    ],
)
def test_a_damaged_invitation_is_named(settings, tmp_path, nodes, change, message):
    path = tmp_path / "n.invite"
    admission.invite(settings, "north", path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message) as refused:
        Invitation.read(path)
    assert "\n" not in str(refused.value)


def test_an_expired_token_registers_nothing(tmp_path):
    note(tmp_path, "north", "token", (datetime.now(UTC) - timedelta(seconds=1)).isoformat(), False)
    with pytest.raises(InvitationRefused, match="expired"):
        claim(tmp_path, "north", "token", b"ecdsa key")
    note(tmp_path, "north", "other", (datetime.now(UTC) + timedelta(days=1)).isoformat(), True)
    for silo, token in (("north", "token"), ("south", "other"), ("south", ""), ("north", "")):
        with pytest.raises(InvitationRefused, match="no such invitation"):
            claim(tmp_path, silo, token, b"ecdsa key")
    assert claim(tmp_path, "north", "other", b"ecdsa key")
    assert claim(tmp_path, "north", "other", b"ecdsa key again")  # its comment is another
    with pytest.raises(InvitationRefused, match="was used"):
        claim(tmp_path, "north", "other", b"ecdsa other")
    unclaim(tmp_path, "north")  # the SuperLink did not register it: the token stays good
    assert claim(tmp_path, "north", "other", b"ecdsa other")


def test_one_of_many_wins_a_token(tmp_path):
    note(tmp_path, "north", "token", (datetime.now(UTC) + timedelta(days=1)).isoformat(), False)
    won = []

    def attempt(number):
        with contextlib.suppress(InvitationRefused):
            claim(tmp_path, "north", "token", b"ecdsa %d" % number)
            won.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


# -- a silo joins ------------------------------------------------------------------------------------------------------


def test_a_silo_joins_with_one_command(settings, tmp_path, nodes, served, rows):
    invitation = invited(settings, tmp_path)
    joined = joining.join(invitation, tmp_path / "north", rows)
    silo = read_silo_or_node_settings(joined.settings)
    assert (silo.name, silo.superlink, silo.policy.preset, silo.approval, joined.rows) == (
        "north", settings.public_address, "trusting", "ask", 60,
    )  # fmt: skip
    key = tmp_path / "north" / "silo.key"
    assert (mode(key), mode(joined.settings)) == (0o600, 0o600)
    assert nodes["north"].split()[:2] == (tmp_path / "north" / "silo.key.pub").read_text().split()[:2]
    shown = subprocess.run(["ssh-keygen", "-y", "-f", key], capture_output=True, text=True, check=True).stdout
    assert shown.split()[:2] == nodes["north"].split()[:2]
    assert served == ["silo 'north' used its invitation, and is node 1"]
    # the same again: nothing is overwritten, and the token is used up
    with pytest.raises(InputError, match=r"silo\.yaml: is already there"):
        joining.join(invitation, tmp_path / "north", rows)
    with pytest.raises(InputError, match="this invitation was used"):
        joining.join(invitation, tmp_path / "thief", rows)
    assert not (tmp_path / "thief" / "silo.yaml").exists()


def test_a_masked_silo_shows_its_identity_and_then_the_lists_fingerprint(settings, tmp_path, nodes, served, rows):
    invitation = invited(settings, tmp_path)
    made = joining.join(invitation, tmp_path / "north", replace(rows, policy="masked"), registers=False)
    assert mode(tmp_path / "north" / "identity.key") == 0o600
    silo = read_silo_or_node_settings(made.settings)
    assert made.identity == silo.masked.peers["north"]
    spoken = " ".join(made.identity[at : at + 4] for at in range(0, 64, 4)).upper()  # by telephone
    written = made.settings.read_text()
    made.settings.write_text(written.replace(made.identity, spoken))
    assert read_silo_or_node_settings(made.settings) == silo
    made.settings.write_text(written.replace(made.identity, spoken[:-1]))
    with pytest.raises(InputError, match=r"peers\.north: must be the 64 hexadecimal digits .* \(got 63\)"):
        read_silo_or_node_settings(made.settings)
    with pytest.raises(InputError, match=r"masked\.peers: 1 silos; the list has 3 to 50"):
        masks_line(silo)
    silo.masked.peers.update(south="ab" * 32, west="cd" * 32)
    said = masks_line(silo)
    assert f"fingerprint {read_masked(silo)[1].fingerprint} of 3 silos; sums of at least 3 of them" in said
    assert "if up to 1 of the others help" in said
    silo.masked.peers["north"] = "00" * 32
    with pytest.raises(InputError, match="north is listed with another key than its own"):
        masks_line(silo)


def test_a_lost_answer_is_asked_for_again(settings, tmp_path, nodes, served, rows, monkeypatch):
    invitation = invited(settings, tmp_path)
    ask = enrollment.ask

    def lost(*words, **options):
        ask(*words, **options)
        raise SilotuneError("the line broke")

    monkeypatch.setattr(enrollment, "ask", lost)
    with pytest.raises(SilotuneError, match="the line broke"):
        joining.join(invitation, tmp_path / "north", rows)
    monkeypatch.setattr(enrollment, "ask", ask)
    joining.join(invitation, tmp_path / "north", rows)
    assert len(served) == 1


def test_a_new_key_replaces_the_old_and_an_expelled_silo_comes_back(settings, tmp_path, nodes, served, rows):
    joining.join(invited(settings, tmp_path), tmp_path / "north", rows)
    first = nodes["north"]
    joining.replace_key(invited(settings, tmp_path, replace=True), tmp_path / "north")
    second = nodes["north"]
    assert first != second
    assert (tmp_path / "north" / "silo.key.pub").read_text().split()[:2] == second.split()[:2]
    assert mode(tmp_path / "north" / "silo.key") == mode(tmp_path / "north" / "silo.key.old") == 0o600
    del nodes["north"]  # `federation expel`
    joining.replace_key(invited(settings, tmp_path), tmp_path / "north")
    assert nodes["north"] not in (first, second)
    with pytest.raises(InputError, match="is for silo 'south'"):
        joining.replace_key(invited(settings, tmp_path, "south"), tmp_path / "north")


def test_what_a_silo_cannot_join_with(settings, tmp_path, nodes, served, rows):
    invitation = invited(settings, tmp_path)
    other = initialize.init(tmp_path / "other", "localhost", port=9444)
    authority = (other.coordinator.parent / "tls" / "ca.pem").read_text()
    for change, answers, message in [
        ({"token": "guess"}, rows, "no such invitation"),
        ({"silo": "south"}, rows, "no such invitation"),
        ({"ca": authority}, rows, "not one that the authority vouches for"),
        ({}, replace(rows, data=tmp_path / "none.csv"), r"none\.csv: not found"),
        ({}, replace(rows, label="stars"), "stars"),
        ({}, replace(rows, policy="anything"), r"silo\.yaml: policy"),
        ({}, replace(rows, policy="private"), r"labels: are to be declared .*\(`silo join --labels`\)"),
        ({}, replace(rows, policy="private", epsilon=8.0, unit="person", labels_later=True), "person"),
        ({}, replace(rows, policy="private", labels=("bad", "good")), "needs the budget of each row or person"),
        ({}, replace(rows, policy="private", labels=("bad", "good"), unit="person"), "person"),
        ({}, replace(rows, share=("everything",)), r"silo\.yaml: share"),
    ]:
        with pytest.raises(InputError, match=message) as refused:
            joining.join(invitation.model_copy(update=change), tmp_path / "new", answers)
        assert "\n" not in str(refused.value)
        assert ".silo.yaml.new" not in str(refused.value)
        assert not (tmp_path / "new" / "silo.yaml").exists()
    assert nodes == {}
    private = replace(rows, policy="private", epsilon=8.0, unit="patient", labels=("bad", "good"))
    joining.join(invitation, tmp_path / "new", private)
    made = read_silo_or_node_settings(tmp_path / "new" / "silo.yaml")
    assert (made.policy.preset, made.privacy.unit, made.privacy.epsilon) == ("private", "patient", 8.0)
    joining.join(invitation, tmp_path / "noised", replace(rows, epsilon=8.0), registers=False)
    assert mode(tmp_path / "noised" / "noise.key") == 0o600


def test_a_silo_that_named_no_policy_may_declare_its_labels_later(settings, tmp_path, nodes, silotune, rows):
    """`private` is the default, and nobody was asked for labels; the doctor's test below says that it refuses."""
    invited(settings, tmp_path)
    (file,) = tmp_path.glob("north-*.invite")
    words = "--data", rows.data, "--text", "review", "--label", "opinion", "--unit", "patient", "--no-register"
    outcome = silotune("silo", "join", file, *words, "--to", tmp_path / "north")
    assert (outcome.code, "to do: name all labels in " in outcome.out) == (0, True)
    assert "policy: private" in (tmp_path / "north" / "silo.yaml").read_text()
    outcome = silotune("silo", "join", file, *words, "--policy", "private", "--to", tmp_path / "other")
    assert (outcome.code, "labels: are to be declared" in outcome.err) == (2, True)


def test_numbers_are_not_taken_for_labels_without_a_word(settings, tmp_path, nodes, silotune):
    invited(settings, tmp_path)
    (file,) = tmp_path.glob("north-*.invite")
    path = tmp_path / "scores.csv"
    path.write_text("text,label\n" + "".join(f"words of row {number},0.{number:02}\n" for number in range(80)))
    words = "silo", "join", file, "--data", path, "--policy", "trusting", "--no-register"
    warned = silotune(*words, "--to", tmp_path / "labels")
    assert "warning: silo 'north': 80 labels for 48 training rows; are they numbers to be predicted" in warned.out
    joined = silotune(*words, "--kind", "regression", "--to", tmp_path / "numbers")
    assert (joined.code, "labels for" in joined.out) == (0, False)
    assert read_silo_or_node_settings(tmp_path / "numbers" / "silo.yaml").data.kind == "regression"
    refused = silotune(*words, "--kind", "regresion", "--to", tmp_path / "other")
    assert (refused.code, "kind" in refused.err, "regression" in refused.err) == (2, True, True), refused.err


def test_a_silent_coordinator_is_said(tmp_path, settings, nodes, rows):
    with pytest.raises(SilotuneError, match="does not answer"):
        joining.join(invited(settings, tmp_path), tmp_path / "north", rows)
    joined = joining.join(invited(settings, tmp_path), tmp_path / "north", rows, registers=False)
    assert joined.settings.exists()
    check_public_key((tmp_path / "north" / "silo.key.pub").read_text())


# -- the endpoint as an attacker sees it -------------------------------------------------------------------------------


def connected(settings):
    context = ssl.create_default_context(cafile=settings.ca)
    plain = socket.create_connection(("127.0.0.1", settings.enrollment_port), timeout=10)
    return context.wrap_socket(plain, server_hostname="localhost")


def answered(settings, request):
    with connected(settings) as connection:
        connection.sendall(request)
        reply = b""
        with contextlib.suppress(OSError):
            while piece := connection.recv(4096):
                reply += piece
    return int(reply.split()[1]) if reply else 0


def posted(body, length=None):
    return b"POST /v1/enroll HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body


def test_the_endpoint_refuses_all_but_its_request(settings, nodes, served):
    public = public_node_key(make_node_key(), "x").decode()
    good = {"silo": "north", "token": "t", "public_key": public}
    rsa = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9Yw0Cq3Xn1rYpB3Zl5n8x1kQJm0Vw8oQy7S1m2c3d4"
    for request, status in [
        (b"GET /v1/enroll HTTP/1.1\r\n\r\n", 200),
        (b"GET /v1/control/list-runs HTTP/1.1\r\n\r\n", 404),
        (b"POST /v1/enroll/../x HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 404),
        (b"PUT /v1/enroll HTTP/1.1\r\n\r\n", 501),
        (b"POST /v1/enroll HTTP/1.1\r\n\r\n", 413),
        (b"POST /v1/enroll HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413),
        (b"POST /v1/enroll HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 413),
        (posted(b"", 10**12), 413),
        (posted(b"", 4097), 413),
        (posted(b"no json"), 400),
        (posted(b"[" * 4000), 400),
        (posted(b"\xff\xfe"), 400),
        (posted(b"[]"), 400),
        (posted(json.dumps(good | {"token": 1}).encode()), 400),
        (posted(json.dumps(good | {"silo": "../x"}).encode()), 400),
        *((posted(json.dumps(good | {"public_key": key}).encode()), 400) for key in (rsa, "ecdsa-sha2-nistp384 AAAA")),
        (posted(json.dumps(good).encode()), 403),
        (b"GET /" + b"a" * 70000, 414),
    ]:
        assert answered(settings, request) == status, request[:80]
    assert nodes == {}


def test_a_stalled_client_holds_up_nobody_and_is_cut(settings, nodes, monkeypatch):
    monkeypatch.setattr(enrollment._Handler, "timeout", 0.5)
    server = enrollment.serve_enrollment(settings, print)
    with contextlib.closing(server.socket), contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_connection(("127.0.0.1", settings.enrollment_port)))  # speaks no TLS
        slow = stack.enter_context(connected(settings))
        slow.sendall(posted(b"{", 4000))
        assert answered(settings, b"GET /v1/enroll HTTP/1.1\r\n\r\n") == 200
        slow.settimeout(20)
        with contextlib.suppress(OSError):
            assert slow.recv(100) == b""
        server.shutdown()


def test_the_doctor_says_what_is_wrong(settings, tmp_path, nodes, served):
    """The enrollment's server answers 404 to /health and to the Control API's path, as a proxy without SuperLink."""
    found = {finding.check: finding for finding in check_proxy(settings.public_address, settings.ca)}
    assert found["connection"].state == "problem"
    assert (found["clock"].state, found["control API"].state, found["version"].state) == ("ok", "ok", "ok")
    other = initialize.init(tmp_path / "other", "localhost", port=9444)
    first = check_proxy(settings.public_address, other.coordinator.parent / "tls" / "ca.pem")[0]
    assert (first.state, "vouches for" in first.detail) == ("problem", True)
    assert first.remedy
    secret = tmp_path / "secret"
    secret.write_text("")
    secret.chmod(0o640)
    assert check_secret("key", secret).remedy.startswith(f"chmod 600 {secret}")
    secret.chmod(0o600)
    assert check_secret("key", secret).state == "ok"
    assert check_secret("key", tmp_path / "none").state == "problem"


def test_the_doctor_trains_under_the_policy_and_looks_who_reads_the_rows(
    settings, tmp_path, rows, backbone_folder, short
):
    private = replace(rows, policy="private", epsilon=8.0, unit="patient", labels=("bad", "good"))
    private = replace(private, backbone=str(backbone_folder("bert")))
    silo = joining.join(invited(settings, tmp_path), tmp_path / "north", private, registers=False).settings

    def found(change=()):
        local = read_silo_or_node_settings(silo)
        local = local.model_copy(update={"superlink": None, "data": local.data.model_copy(update=dict(change))})
        return {finding.check: finding for finding in examine_silo(local)}

    good = found()
    assert good["dry round"].detail.startswith("trained one step with noise for each patient, scored")
    assert "labels: are to be declared" in found({"labels": None})["dry round"].detail
    short.chmod(0o755)  # else no other user enters
    path = short / "rows.csv"
    path.write_bytes(rows.data.read_bytes())
    assert (found({"path": str(path)})["rows"].state, check_rows(path).remedy) == ("problem", f"chmod -R go= {path}")
    path.chmod(0o600)
    assert check_rows(path).state == "ok"


# -- templates ---------------------------------------------------------------------------------------------------------


def test_deploy_shows_the_packages_templates():
    names = {path.relative_to(TEMPLATES) for path in TEMPLATES.rglob("*") if path.is_file()}
    assert {"nginx.conf", "compose.yaml", "systemd/silotune-proxy.service"} <= {str(name) for name in names}
    for name in names:
        assert (ROOT / "deploy" / name).read_bytes() == (TEMPLATES / name).read_bytes()
    with pytest.raises(AssertionError, match=r"nginx\.conf: lacks 'no such'"):
        filled("nginx.conf", {"no such": ""})
