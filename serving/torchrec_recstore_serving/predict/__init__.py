"""The server of predictions, ``recstore follow``.

It needs the extra ``predict`` of this distribution, which an export does not need.

Tests: tests/serving/predict/test_without_extra.py.
"""

from importlib.util import find_spec

from torchrec_recstore.installing import install

_NEEDED = (
    "google.protobuf",
    "grpc",
    "prometheus_client",
    "tornado",
    "torchrec_recstore_service",
)
"""The packages that the extra installs."""


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it is not installed either
        return False


for _package in _NEEDED:
    if not _is_installed(_package):
        raise ImportError(
            f"the server of predictions needs {_package}, which is not installed:"
            f" {install('predict', part='serving')}",
            name="torchrec-recstore-serving[predict]",
        )
