"""The token and the certificates of a server, which follow their files.

Tests: tests/service/test_access.py.
"""

from __future__ import annotations

import logging
import ssl
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from torchrec_recstore.network import check_token

_LOOK_S = 1.0
_TOKEN_CHARACTERS = 16
_TOKEN_DIFFERENT = 8
_Value = TypeVar("_Value")

_log = logging.getLogger(__name__)


class Watched(Generic[_Value]):
    """A value that is read from files, and is read again when a file changes.

    If the files cannot be used any more, the last value stays, and a line on stderr
    says why.

    Args:
        files: The paths of the files.
        read: A function that reads the value.

    Raises:
        OSError, ValueError: The files cannot be used now.
    """

    def __init__(self, files: Sequence[Path], read: Callable[[], _Value]) -> None:
        self.files = files
        """The paths of the files."""
        self._read = read
        self._lock = threading.Lock()
        self._stamps = self._present_stamps()
        self._value = read()
        self._looked = time.monotonic()

    @property
    def value(self) -> _Value:
        """The value. A change of the files is seen after a second at the latest."""
        if time.monotonic() - self._looked >= _LOOK_S:
            with self._lock:
                self._looked = time.monotonic()
                self._look()
        return self._value

    def _look(self) -> None:
        stamps = self._present_stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._value = self._read()
        except (OSError, ValueError) as error:
            _log.error("%s; the server goes on with what it has read before", error)
        else:
            _log.info("%s: read again", ", ".join(map(str, self.files)))

    def _present_stamps(self) -> list[tuple[int, ...]]:
        """Returns numbers of each file that differ after a change."""
        stamps: list[tuple[int, ...]] = []
        for file in self.files:
            try:
                status = file.stat()
            except OSError:
                stamps.append(())
                continue
            stamps.append(
                (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            )
        return stamps


@dataclass(frozen=True)
class Certificates:
    """The contents of a server's PEM files.

    Args:
        cert: The certificate.
        key: The private key.
        client_ca: The certificates of the authorities that sign clients' certificates,
            if clients need one.
    """

    cert: bytes
    key: bytes
    client_ca: bytes | None


def watched_token(file: Path) -> Watched[str]:
    """Returns the token of a file.

    Raises:
        OSError, ValueError: The file cannot be read, other users can read it, or the
            token is weak.
    """

    def read() -> str:
        flag = f"--token-file {file}"
        _check_private(file, flag)
        token = file.read_text().strip()
        check_token(token, f"{flag}: the token")
        if len(token) < _TOKEN_CHARACTERS or len(set(token)) < _TOKEN_DIFFERENT:
            raise ValueError(
                f"{flag}: the token must have at least {_TOKEN_CHARACTERS} characters,"
                f" {_TOKEN_DIFFERENT} of them different: openssl rand -hex 32"
                " prints one"
            )
        return token

    return Watched([file], read)


def watched_certificates(
    cert: Path,
    key: Path,
    client_ca: Path | None,
) -> Watched[Certificates]:
    """Returns the contents of a server's PEM files.

    Raises:
        OSError, ValueError: A file cannot be read or holds no certificate or key in PEM
            format, a key is too short, or other users can read the private key. The
            message names the flag.
    """

    def read() -> Certificates:
        _check_private(key, f"--tls-key {key}")
        # The error of ssl does not name the file.
        content = Certificates(
            cert.read_bytes(),
            key.read_bytes(),
            None if client_ca is None else client_ca.read_bytes(),
        )
        _context(cert, key, client_ca)
        return content

    files = [cert, key]
    if client_ca is not None:
        files.append(client_ca)
    return Watched(files, read)


def watched_context(
    cert: Path,
    key: Path,
    client_ca: Path | None,
) -> Watched[ssl.SSLContext]:
    """Returns a context of TLS with a server's PEM files.

    See :func:`watched_certificates` for the errors.
    """
    certificates = watched_certificates(cert, key, client_ca)
    return Watched(certificates.files, lambda: _context(cert, key, client_ca))


def _context(
    cert: Path,
    key: Path,
    client_ca: Path | None,
) -> ssl.SSLContext:
    """Checks PEM files, because gRPC reports an invalid file as an address that cannot
    be listened on.

    Returns:
        A context with the certificates.

    Raises:
        ValueError: A file does not hold a certificate or key, or a key is too short.
            The message names the flag.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # keys of RSA with 2048 bits, or what is as strong
    context.set_ciphers("DEFAULT@SECLEVEL=2")
    try:
        # gRPC takes no encrypted key; no prompt
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
            raise ValueError(
                f"--tls-cert {cert} is weak: make one with a key of RSA with 2048 bits"
                " or more"
            ) from None
        raise ValueError(
            f"--tls-cert {cert} and --tls-key {key} are not a certificate and its"
            " private key in PEM format"
        ) from None
    try:
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError:
        raise ValueError(
            f"--client-ca {client_ca} holds no certificates in PEM format"
        ) from None
    return context


def _check_private(file: Path, flag: str) -> None:
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ValueError(
            f"{flag} can be read by every user of this machine (mode {mode:04o}): chmod"
            f" 600 {file}"
        )
