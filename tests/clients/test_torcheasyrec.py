"""Jobs of TorchEasyRec with RecStore tables: training, its checkpoints on one and two
ranks, export and prediction.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from torch.distributed.checkpoint import FileSystemReader

from . import torcheasyrec
from .torcheasyrec import (
    CHANGES,
    MODELS,
    SOURCE,
    evaluations,
    run,
    write_clicks,
    write_config,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not SOURCE, reason="TORCHEASYREC_SOURCE names no checkout of TorchEasyRec"
    ),
]

FAR = 7
"""The factor of ids between which there are ids without a row."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the packages ``stock`` and ``recstore`` and the click logs
    ``near``, ``far`` and ``raw``.
    """
    folder = tmp_path_factory.mktemp("torcheasyrec")
    torcheasyrec.prepare(folder)
    for name, factor in (("near", 1), ("far", FAR), ("raw", 2**53 + 1)):
        write_clicks(folder / name, factor)
    yield folder
    shutil.rmtree(folder)


def train(
    package: Path, config: Path, *flags: object, ranks: int = 1
) -> dict[str, float]:
    """Trains a model, and returns the metrics of its last evaluation."""
    run(package, "train_eval", "--pipeline_config_path", config, *flags, ranks=ranks)
    return evaluations(config.with_suffix(""))[-1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_equal_to_stock_from_equal_rows(model: str, ranks: int, work: Path) -> None:
    start = write_config(work / "near" / f"{model}_start_{ranks}.config", model)
    before = train(work / "stock", start)
    after = {}
    for tables in ("sharded", "recstore"):
        config = write_config(
            start.with_name(f"{model}_{tables}_{ranks}.config"), model
        )
        flags = (
            "--fine_tune_checkpoint",
            start.with_suffix(""),
            "--ignore_restore_optimizer",
        )
        after[tables] = train(work / tables, config, *flags, ranks=ranks)
    assert after["recstore"] == pytest.approx(after["sharded"], rel=2e-5)
    assert any(
        after["recstore"][key] != pytest.approx(before[key], rel=2e-3) for key in before
    )


def test_stock_optimizer_states_start_at_zero(work: Path) -> None:
    start = write_config(work / "near" / "stock_states.config", "deepfm")
    train(work / "stock", start)
    config = write_config(start.with_name("their_states.config"), "deepfm")
    after = train(
        work / "recstore", config, "--fine_tune_checkpoint", start.with_suffix("")
    )
    assert after["auc"] > 0.85


@pytest.mark.parametrize("ranks", [1, 2])
def test_fine_tuning_takes_a_table_that_stock_has_replicated(
    ranks: int, work: Path
) -> None:
    # The planner of TorchEasyRec replicates the table of level, which has four rows.
    # The plan is in the checkpoint.
    start = write_config(work / "near" / f"replicated_{ranks}.config", "deepfm")
    text = start.read_text().replace(
        'feature_names: "price"', 'feature_names: "price" feature_names: "level"'
    )
    start.write_text(text)
    before = train(work / "stock", start)
    (saved,) = start.with_suffix("").glob("*/plan")
    assert '"level_emb": {"sharding_type": "data_parallel"' in saved.read_text()
    config = start.with_name(f"from_replicated_{ranks}.config")
    frozen = text.replace("lr: 0.1", "lr: 0.0").replace("lr: 0.003", "lr: 0.0")
    config.write_text(
        frozen.replace(str(start.with_suffix("")), str(config.with_suffix("")))
    )
    flags = (
        "--fine_tune_checkpoint",
        start.with_suffix(""),
        "--ignore_restore_optimizer",
    )
    after = train(work / "recstore", config, *flags, ranks=ranks)
    assert after == pytest.approx(
        {**before, "global_step": after["global_step"]}, rel=1e-5
    )
    (planned,) = config.with_suffix("").glob("*/plan")
    assert '"data_parallel"' not in planned.read_text()


@pytest.mark.parametrize("model", ["din", "deepfm"])
def test_a_job_continues(model: str, work: Path) -> None:
    whole = train(
        work / "recstore",
        write_config(work / "far" / f"{model}_whole.config", model, 4000, epochs=2),
    )
    half = write_config(work / "far" / f"{model}_half.config", model, 4000)
    train(work / "recstore", half)
    write_config(half, model, 4000, epochs=2)
    assert train(work / "recstore", half, "--continue_train") == whole


def test_checkpoints_on_other_numbers_of_ranks(work: Path) -> None:
    config = write_config(work / "far" / "ranks.config", "din", 4000)
    last = train(work / "recstore", config, ranks=2)
    for epochs, ranks in ((2, 1), (3, 2)):
        run(work / "recstore", "eval", "--pipeline_config_path", config, ranks=ranks)
        again = evaluations(config.with_suffix(""), "eval_result.txt")[-1]
        assert again == pytest.approx(
            {**last, "global_step": last["global_step"]}, rel=1e-6
        )
        write_config(config, "din", 4000, epochs=epochs)
        before, last = (
            last,
            train(work / "recstore", config, "--continue_train", ranks=ranks),
        )
        assert last["auc"] > before["auc"]


@pytest.mark.parametrize("model", ["din", "deepfm", "mmoe"])
def test_an_export_predicts_as_its_checkpoint(model: str, work: Path) -> None:
    config = write_config(work / "far" / f"{model}_exported.config", model, 4000)
    train(work / "recstore", config, ranks=2)
    exported = exported_by(work / "recstore", config)
    of_export = predicted(
        work / "stock", work / "far", "--scripted_model_path", exported
    )
    of_checkpoint = predicted(
        work / "recstore", work / "far", "--pipeline_config_path", config
    )
    for name, values in of_checkpoint.items():
        assert len(values) == 1024
        assert of_export[name] == pytest.approx(values, abs=1e-6)


def test_towers_are_exported_as_those_of_stock(work: Path) -> None:
    start = write_config(work / "near" / "towers.config", "dssm")
    train(work / "stock", start)
    vectors = {}
    for tables in ("stock", "recstore"):
        config = write_config(start.with_name(f"towers_{tables}.config"), "dssm")
        train(
            work / tables,
            config,
            "--fine_tune_checkpoint",
            start.with_suffix(""),
            "--ignore_restore_optimizer",
        )
        exported = exported_by(work / tables, config)
        for tower in ("user", "item"):
            found = predicted(
                work / "stock", work / "near", "--scripted_model_path", exported / tower
            )
            vectors[tables, tower] = found[f"{tower}_tower_emb"]
    for tower in ("user", "item"):
        for ours, theirs in zip(
            vectors["recstore", tower], vectors["stock", tower], strict=True
        ):
            assert ours == pytest.approx(theirs, abs=1e-5)


def test_an_export_has_room_for_all_ids(work: Path) -> None:
    config = write_config(work / "far" / "narrow.config", "deepfm", 100)
    train(work / "recstore", config)
    with pytest.raises(
        AssertionError,
        match=r"the checkpoint has \d+ ids outside \[0, 100\), and row i is id i",
    ):
        exported_by(work / "recstore", config)


def test_raw_ids_in_bounded_tables(work: Path) -> None:
    package = work / "planned"
    shutil.copytree(work / "recstore", package)
    with (package / "tzrec" / "__init__.py").open("a") as file:
        file.write(CHANGES[1])
    config = write_config(work / "raw" / "bounded.config", "din", 2**40)
    first = train(package, config, ranks=2)
    write_config(config, "din", 2**40, epochs=2)
    assert train(package, config, "--continue_train")["auc"] > first["auc"] > 0.75
    (saved,) = (
        FileSystemReader(path).read_metadata()
        for path in config.with_suffix("").glob("*-47/model")
    )
    sizes = {
        key.split(".")[-2]: entry.size
        for key, entry in saved.state_dict_metadata.items()
        if "weight_id" in key
    }
    assert (sizes["user_id_emb"], sizes["item_id_emb"]) == ((250,), (200,))
    found = predicted(package, work / "raw", "--pipeline_config_path", config, ranks=2)
    assert len(found["probs"]) == 1024


def test_raw_ids_are_exported(work: Path) -> None:
    package = work / "exporting"
    shutil.copytree(work / "recstore", package)
    with (package / "tzrec" / "__init__.py").open("a") as file:
        file.write(
            f"{CHANGES[1]}\nfrom torchrec_recstore.inference import"
            " load_library\n\nload_library()\n"
        )
    call = "import sys\n\nexport(*sys.argv[1:])\n"
    (package / "tzrec" / "export_raw.py").write_text("\n".join([*CHANGES, call]))
    config = write_config(work / "raw" / "exported.config", "din", 2**40)
    train(package, config, ranks=2)
    exported = config.with_name("exported_raw")
    exported.mkdir()
    run(package, "export_raw", config, exported)
    of_export = predicted(package, work / "raw", "--scripted_model_path", exported)
    of_checkpoint = predicted(package, work / "raw", "--pipeline_config_path", config)
    assert of_export["probs"] == pytest.approx(of_checkpoint["probs"], abs=1e-6)


def test_an_optimizer_that_stock_tables_lack(work: Path) -> None:
    config = write_config(work / "far" / "adam.config", "deepfm", 4000)
    config.write_text(
        config.read_text().replace(
            "adagrad_optimizer { lr: 0.1 }", "adam_optimizer { lr: 0.01 }"
        )
    )
    assert train(work / "recstore", config)["auc"] > 0.8


def exported_by(package: Path, config: Path) -> Path:
    folder = config.with_name(f"{config.stem}_exported")
    run(
        package,
        "export",
        "--pipeline_config_path",
        config,
        "--export_dir",
        folder,
        QUANT_EMB="0",
    )
    return folder


def predicted(
    package: Path, clicks: Path, *model: object, ranks: int = 1
) -> dict[str, list[float]]:
    """Returns the predictions for the clicks that the model is evaluated on, by the
    name of the column.
    """
    output = clicks / "predicted"
    flags = (
        "--predict_input_path",
        clicks / "eval" / "*.parquet",
        "--predict_output_path",
        output,
    )
    run(package, "predict", *model, *flags, ranks=ranks)
    columns: dict[str, list[float]] = pq.read_table(output).to_pydict()
    shutil.rmtree(output)
    return columns
