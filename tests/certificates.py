"""Certificates for tests of servers with TLS, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None,
    reason="openssl, which makes the certificates, is not here",
)


def make_certificates(path: Path) -> Path:
    """Makes ca.pem, and server and client certificates that the CA has signed, in the
    folder ``path``.

    Returns it.
    """

    def openssl(*arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=path, check=True, capture_output=True
        )

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    # Python 3.13 verifies as RFC 5280 demands, which the certificate of an authority
    # needs this extension for.
    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    openssl(
        "req",
        "-x509",
        *key,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-subj",
        "/CN=ca",
        "-days",
        "1",
        *usage,
    )
    (path / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(
            "req",
            *key,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
        )
        signed = [
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-days",
            "1",
            "-extfile",
            "names",
        ]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return path
