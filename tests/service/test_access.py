"""Tests of the access to a server: tokens and TLS, listen addresses, health checks and
metrics.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.certificates import make_certificates, needs_openssl
from tests.recstore_server import RecStoreServer
from tests.redis_server import free_port
from tests.secrets import write_secret
from torchrec_recstore_service import RecStoreClient, ServiceError
from torchrec_recstore_service.server.credentials import watched_certificates

IDS = torch.arange(10)
TOKEN = "correct-horse-battery"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with ca.pem, and with server and client certificates that the CA
    has signed.
    """
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def _use(client: RecStoreClient) -> None:
    client.init_data("t", (10, 4), torch.float32)
    client.push("t", IDS, torch.ones(10, 4))
    assert torch.equal(client.pull("t", IDS), torch.ones(10, 4))


@needs_openssl
def test_tls_token_and_clients_own_certificates(
    tmp_path: Path, certificates: Path
) -> None:
    write_secret(tmp_path / "token", TOKEN + "\n")
    server = RecStoreServer(
        tmp_path / "data",
        *(
            "--tls-cert",
            str(certificates / "server.pem"),
            "--tls-key",
            str(certificates / "server.key"),
        ),
        *(
            "--client-ca",
            str(certificates / "ca.pem"),
            "--token-file",
            str(tmp_path / "token"),
        ),
        listen="0.0.0.0:0",
    )
    address = f"127.0.0.1:{server.address.rpartition(':')[2]}"
    mine = {
        "tls_cert": certificates / "client.pem",
        "tls_key": certificates / "client.key",
    }
    ca = certificates / "ca.pem"
    with RecStoreClient([address], token=TOKEN, tls_ca=ca, **mine) as client:
        _use(client)
    for token in (None, "wrong", TOKEN + "x"):
        with RecStoreClient([address], token=token, tls_ca=ca, **mine) as client:
            with pytest.raises(
                ServiceError, match=rf"server {address}: the token is missing or wrong"
            ) as error:
                client.pull("t", IDS)
            assert TOKEN not in str(error.value)
    for other in ({}, {"tls_ca": ca}, {"tls_ca": certificates / "client.pem", **mine}):
        client = RecStoreClient([address], token=TOKEN, **other, timeout_s=1)
        with pytest.raises(
            ServiceError,
            match=rf"server {address} (cannot be reached|has not answered)",
        ):
            client.pull("t", IDS)
    assert TOKEN not in repr(client)
    server.kill()


@pytest.mark.slow
@needs_openssl
def test_changed_tokens_and_certificates_are_read_again(
    tmp_path: Path, certificates: Path
) -> None:
    folder = tmp_path / "now"
    shutil.copytree(certificates, folder)
    write_secret(folder / "token", TOKEN)
    files = (
        "--tls-cert",
        folder / "server.pem",
        "--tls-key",
        folder / "server.key",
        "--client-ca",
        folder / "ca.pem",
    )
    server = RecStoreServer(
        tmp_path / "data", *map(str, files), "--token-file", str(folder / "token")
    )

    def client(authority: Path, token: str) -> RecStoreClient:
        mine = {
            "tls_cert": authority / "client.pem",
            "tls_key": authority / "client.key",
        }
        return RecStoreClient(
            [server.address],
            token=token,
            tls_ca=authority / "ca.pem",
            **mine,
            timeout_s=1.0,
        )

    def until_it_answers(authority: Path, token: str) -> None:
        while True:
            with client(authority, token) as each, suppress(ServiceError):
                each.init_data("t", (10, 4), torch.float32)
                return
            time.sleep(0.1)

    until_it_answers(certificates, TOKEN)
    write_secret(folder / "token", "another-" + TOKEN)
    until_it_answers(certificates, "another-" + TOKEN)
    with (
        client(certificates, TOKEN) as before,
        pytest.raises(ServiceError, match="token is missing or wrong"),
    ):
        before.pull("t", IDS)
    for weak in ("short", "\n", "a" * 40):  # not used, and the last one stays
        write_secret(folder / "token", weak)
        while server.stderr.count("goes on with what it has read before") == 0:
            with (
                client(certificates, "another-" + TOKEN) as each,
                suppress(ServiceError),
            ):
                each.stats("t")
        until_it_answers(certificates, "another-" + TOKEN)
    write_secret(folder / "token", TOKEN)
    others = make_certificates(tmp_path)
    for name in ("server.pem", "ca.pem", "server.key"):
        shutil.copy(others / name, folder / name)
    until_it_answers(others, TOKEN)
    with (
        client(certificates, TOKEN) as before,
        pytest.raises(ServiceError, match="cannot be reached"),
    ):
        before.pull("t", IDS)
    (folder / "server.key").write_text("no key")
    time.sleep(1.5)
    until_it_answers(others, TOKEN)
    assert "server.key are not a certificate and its private key" in server.stderr
    assert TOKEN not in server.stderr
    server.kill()


@needs_openssl
@pytest.mark.slow
def test_saves_on_a_schedule_with_tls_and_a_token(
    tmp_path: Path, certificates: Path
) -> None:
    folder = tmp_path / "now"
    shutil.copytree(certificates, folder)
    write_secret(folder / "token", TOKEN)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    files = (
        "--tls-cert",
        folder / "server.pem",
        "--tls-key",
        folder / "server.key",
        "--client-ca",
        folder / "ca.pem",
    )
    files += ("--tls-ca", folder / "ca.pem", "--token-file", folder / "token")
    flags = [
        *map(str, files),
        "--save-every",
        "0.3",
        "--keep",
        "2",
        "--servers",
        ",".join(addresses),
    ]
    servers = [
        RecStoreServer(tmp_path / str(n), *flags, listen=address)
        for n, address in enumerate(addresses)
    ]

    def client(token: str) -> RecStoreClient:
        mine = {"tls_cert": folder / "client.pem", "tls_key": folder / "client.key"}
        return RecStoreClient(addresses, token=token, tls_ca=folder / "ca.pem", **mine)

    def saves() -> set[str]:
        found = [
            {path.name for path in server.data.glob("scheduled-*")}
            for server in servers
        ]
        return set.intersection(*found)

    with client(TOKEN) as each:
        _use(each)
    while not (first := saves()):
        time.sleep(0.05)
    # the schedule uses the present token
    write_secret(folder / "token", "another-" + TOKEN)
    while first & saves():
        time.sleep(0.05)
    for server in servers:
        server.kill()
    for server in servers:
        server.start()
    with client("another-" + TOKEN) as each:
        assert torch.equal(each.pull("t", IDS), torch.ones(10, 4))
    for server in servers:
        assert TOKEN not in server.stderr
        server.kill()


def test_a_token_alone(tmp_path: Path) -> None:
    write_secret(tmp_path / "token", TOKEN)
    port = free_port()
    flags = [
        "--token-file",
        str(tmp_path / "token"),
        "--metrics",
        f"127.0.0.1:{port}",
        "--max-rows",
        "100",
    ]
    server = RecStoreServer(tmp_path / "data", *flags)
    with RecStoreClient([server.address], token=TOKEN) as client:
        _use(client)
        for step in range(5):
            client.update("t", torch.arange(50) + 50 * step, torch.ones(50, 4))
        with pytest.raises(ValueError, match="needs 101 rows"):
            client.update("t", torch.arange(101), torch.ones(101, 4))
    with (
        RecStoreClient([server.address]) as client,
        pytest.raises(ServiceError, match="token"),
    ):
        client.pull("t", IDS)
    # a supervisor that restarts servers does not need the token
    with grpc.insecure_channel(server.address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest()
        )
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    lines = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")
    )
    # not those of a refused call
    assert float(lines['recstore_ids_total{operation="update",table="t"}']) == 250
    assert float(lines['recstore_ids_total{operation="pull",table="t"}']) == 10
    assert float(lines['recstore_calls_total{method="Write",outcome="ok"}']) == 6
    assert (
        float(lines['recstore_calls_total{method="Write",outcome="ValueError"}']) == 1
    )
    assert 50 <= float(lines['recstore_table_rows{table="t"}']) <= 100
    assert float(lines['recstore_table_evicted_total{table="t"}']) > 0
    assert float(lines['recstore_call_seconds_count{method="Pull"}']) == 1
    server.kill()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--listen", "0.0.0.0:0"], "needs --tls-cert and --tls-key and --token-file"),
        (
            ["--listen", "0.0.0.0:0", "--token-file", "TOKEN"],
            "needs --tls-cert and --tls-key",
        ),
        (["--listen", "[::]:0"], "can be reached from other machines"),
        (["--listen", "example.org:7000"], "can be reached from other machines"),
        (["--listen", "here"], "--listen must be HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "--listen must be HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--tls-cert", "x"], "must be given together"),
        (["--listen", "127.0.0.1:0", "--client-ca", "x"], "--client-ca needs"),
        (
            ["--listen", "127.0.0.1:0", "--tls-cert", "x", "--tls-key", "y"],
            "No such file",
        ),
        (
            ["--listen", "127.0.0.1:0", "--tls-cert", "TOKEN", "--tls-key", "TOKEN"],
            "TOKEN are not a certificate and its private key",
        ),
        (
            ["--listen", "127.0.0.1:0", "--tls-cert", "TOKEN", "--tls-key", "OPEN"],
            "OPEN can be read by every user of this machine (mode 0644): chmod 600",
        ),
        (
            ["--listen", "127.0.0.1:0", "--token-file", "OPEN"],
            "OPEN can be read by every user of this machine",
        ),
        (
            ["--listen", "127.0.0.1:0", "--token-file", "SHORT"],
            "must have at least 16 characters, 8 of them different",
        ),
        (
            ["--listen", "127.0.0.1:0", "--token-file", "SAME"],
            "must have at least 16 characters, 8 of them different",
        ),
        (
            ["--listen", "127.0.0.1:0", "--max-calls", "0"],
            "--max-calls must be at least 1, got 0",
        ),
        (
            ["--listen", "127.0.0.1:0", "--max-request-memory", "0.01"],
            "--max-request-memory must be at least 0.06",
        ),
        (
            ["--listen", "127.0.0.1:0", "--token-file", "nothing"],
            "nothing: No such file",
        ),
        (
            ["--listen", "127.0.0.1:0", "--token-file", "EMPTY"],
            "the token must be of printable ASCII",
        ),
        (["--listen", "127.0.0.1:0", "--metrics", "x"], "--metrics must be HOST:PORT"),
        (
            ["--listen", "127.0.0.1:0", "--eviction", "lru"],
            "--eviction needs --max-rows",
        ),
        (
            ["--listen", "127.0.0.1:0", "--half-life-steps", "3", "--max-rows", "9"],
            "--eviction lfu",
        ),
        (
            ["--listen", "127.0.0.1:0", "--max-rows", "0"],
            "--max-rows must be at least 1, got 0",
        ),
        (
            ["--listen", "127.0.0.1:0", "--expire-steps", "-1"],
            "--expire-steps must be at least 1, got -1",
        ),
        (
            ["--listen", "127.0.0.1:0", "--drop-idle-after", "0"],
            "--drop-idle-after must be a positive number",
        ),
    ],
)
def test_flags_that_make_no_sense(
    tmp_path: Path, flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchrec_recstore.cli import app

    write_secret(tmp_path / "TOKEN", TOKEN)
    write_secret(tmp_path / "EMPTY", "\n")
    write_secret(tmp_path / "SHORT", TOKEN[:15])
    write_secret(tmp_path / "SAME", 20 * "abcdefg")
    write_secret(tmp_path / "OPEN", TOKEN).chmod(0o644)
    flags = [
        (
            str(tmp_path / flag)
            if flag in ("TOKEN", "EMPTY", "SHORT", "SAME", "OPEN")
            else flag
        )
        for flag in flags
    ]
    with pytest.raises(SystemExit) as exit_:
        app(["serve", "--data", str(tmp_path / "data"), *flags], prog_name="recstore")
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert error in err
    assert len(err.splitlines()) == 1
    assert not out


@needs_openssl
@pytest.mark.parametrize(
    ("bits", "strong"), [(1024, False), (1536, False), (2048, True)]
)
def test_keys_of_rsa(tmp_path: Path, bits: int, strong: bool) -> None:
    key = (
        "-newkey",
        f"rsa:{bits}",
        "-nodes",
        "-keyout",
        "key",
        "-out",
        "cert",
        "-subj",
        "/CN=server",
    )
    subprocess.run(
        ["openssl", "req", "-x509", *key], cwd=tmp_path, check=True, capture_output=True
    )
    (tmp_path / "key").chmod(0o600)
    files = tmp_path / "cert", tmp_path / "key", None
    if strong:
        watched_certificates(*files)
        return
    with pytest.raises(
        ValueError,
        match="cert is weak: make one with a key of RSA with 2048 bits or more",
    ):
        watched_certificates(*files)


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from torchrec_recstore.cli import app\ntry: app(['serve',"
        " '--help'])\nexcept SystemExit: pass\n"
    )
    code += "assert 'torch' not in sys.modules and 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("servers", "arguments", "error"),
    [
        ("127.0.0.1:7700", {}, TypeError),
        ([], {}, ValueError),
        (["127.0.0.1"], {}, ValueError),
        (["127.0.0.1:0"], {}, ValueError),
        (["127.0.0.1:x"], {}, ValueError),
        (["127.0.0.1:1", "127.0.0.1:1"], {}, ValueError),
        ([7700], {}, TypeError),
        (["127.0.0.1:1"], {"timeout_s": 0}, ValueError),
        (["127.0.0.1:1"], {"timeout_s": float("nan")}, ValueError),
        (["127.0.0.1:1"], {"token": ""}, ValueError),
        (["127.0.0.1:1"], {"token": "\n"}, ValueError),
        (["10.0.0.1:1"], {"token": TOKEN}, ValueError),
        (["127.0.0.1:1"], {"tls_cert": "x"}, ValueError),
        (["127.0.0.1:1"], {"tls_ca": "/nothing"}, FileNotFoundError),
    ],
)
def test_arguments_that_make_no_sense(
    servers, arguments: dict, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        RecStoreClient(servers, **arguments)
    assert TOKEN not in str(caught.value)
