"""The programs of examples/trainers learn, and continue to the bit after they have lost
processes.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchrec_recstore import read_info

from .commands import run_forked, run_script
from .models.data import criteo

STEPS = 18  # whole batches of 80 % of the rows
FLAGS = ["--checkpoint-every", "6"]
FIGURES = r"544 rows in 26 tables, test AUC (0\.\d{4})$"


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing),
        reason=f"{' and '.join(missing)} of requirements/trainers.txt not installed",
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return criteo(
        tmp_path_factory.mktemp("data") / "train.txt", rows=STEPS * 512 * 10 // 8
    )


def checksum(checkpoint: Path) -> str:
    """It differs if any bit of the tables, of the dense layers or of the training state
    differs.
    """
    return read_info(checkpoint).checksum


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "place"),
    [
        pytest.param(
            "lightning_fit.py", "step={:09}.ckpt", marks=needs("lightning", "torchdata")
        ),
        pytest.param(
            "accelerate_loop.py", "step-{:09}/model", marks=needs("accelerate")
        ),
    ],
)
def test_the_same_command_continues(
    script: str, place: str, log: Path, tmp_path: Path
) -> None:
    def train() -> tuple[str, str]:
        done = run_forked(
            f"trainers/{script}", "--data", log, "--folder", tmp_path, *FLAGS, ranks=2
        )
        assert done.returncode == 0, done.stderr
        printed = re.search(FIGURES, done.stdout, flags=re.MULTILINE)
        assert printed is not None, done.stdout
        assert float(printed[1]) > 0.9
        return printed[1], checksum(tmp_path / place.format(STEPS))

    assert not list(tmp_path.iterdir())
    undisturbed = train()
    newest = tmp_path / place.format(STEPS).split("/")[0]
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        newest.name.replace("18", "12"),
        newest.name,
    ]
    shutil.rmtree(newest)  # as if the processes had died before they have written it
    assert train() == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs("ray", "pandas")
def test_ray_starts_killed_workers_again(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "RAY_AUTH_MODE": "disabled",  # no token in the home directory
        "RAY_USAGE_STATS_ENABLED": "0",
        # On a slow machine, workers take longer than the minute that they are given.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
        "RAY_worker_niceness": "0",  # its default is 15, and other tests run beside it
        # Fewer processes, and less waiting.
        "RAY_DATA_PARQUET_FOOTER_NUM_ACTORS": "1",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    # Two CPUs, and less memory than /dev/shm usually has. Ray's sockets need a short
    # path.
    cluster = ["--num-cpus", "2", "--object-store-memory", "80000000"]
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        folder = tmp_path / "run"
        flags = ["--data", log, "--folder", folder, "--kill-at", "12", *FLAGS, *cluster]
        for _ in range(3):
            done = run_script("trainers/ray_train.py", *flags, timeout_s=800)
            # Ray's own limit of 30 s, which has no setting
            if "timed out during startup" not in done.stderr:
                break
        else:
            pytest.skip(
                "Ray did not start within its own limit of 30 s on this machine, three"
                " times"
            )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "killed").exists()
    written = re.findall(
        r"step (\d+): .*, checkpoint (\w{32})$", done.stdout, flags=re.MULTILINE
    )
    checksums = dict(written)
    assert set(written) == set(checksums.items()), (
        "what is written again is the same to the bit"
    )
    assert list(checksums) == ["6", "12", "18"]
    # The second worker dies between the checkpoint of step 12 and the report of it, so
    # at least this one is written again. If Ray Train does not know the checkpoint of
    # step 6 either, the workers begin anew.
    assert len(written) in (4, 5), written
    assert done.stdout.count("continues after step 6\n") == 5 - len(written), (
        done.stdout
    )
    assert checksums[f"{STEPS}"] == checksum(folder / f"step-{STEPS:09}")
    printed = re.search(FIGURES, done.stdout, flags=re.MULTILINE)
    assert printed is not None, done.stdout
    assert float(printed[1]) > 0.9
