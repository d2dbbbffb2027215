"""Tests of the log of a training: curves, which are compared with the data, plots, and
the report page.
"""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from common import measure
from common.command import DataError
from common.curves import OVERVIEW, Curve, curve_name, read_curves, tensorboard_tag
from common.measure import Window
from common.page import draw, read_about, write_report
from common.report import plain, print_result, share, short, short_bytes
from common.run import Run
from common.style import SIDE, Line, figure, spread
from criteo import ID_NAMES
from generator import Generator
from rich.console import Console
from sources import batches_of, read_only
from train import train

from .commands import run_forked
from .test_resume import settings_of as resumable
from .test_resume import stopped_after
from .training import train_here

ROWS, BATCH, EVERY = 3000, 60, 4
POINTS = [240 * number for number in range(1, 11)]
TABLES = [f"t_{name}" for name in ID_NAMES]
NAME = 'run <b>& "one"'
VOID = ("meta", "img", "link", "br")
PLOTS = ["auc", "loss", "memory", "rates", "rows", "speed", "step_time", "unseen"]

forked = partial(run_forked, "dlrm/train.py")


settings_of = partial(resumable, limit_rows=ROWS, no_log=False, log_every=EVERY)


class Logged(NamedTuple):
    folder: Path
    result: dict[str, Any]
    curves: dict[str, Curve]


def logged(folder: Path, **changes: Any) -> Logged:
    out = folder.parent / f"{folder.name}.json"
    torch.set_num_threads(1)
    train_here(settings_of(log_dir=folder, json_out=out, **changes))
    return Logged(folder, json.loads(out.read_text()), read_curves(folder))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    return logged(tmp_path_factory.mktemp("logs") / NAME)


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    folder = tmp_path_factory.mktemp("bounded") / "log"
    return logged(folder, max_rows=100, eviction="lru", lr_schedule="linear")


def test_tensorboard_shows_ten_curves_first_and_the_tables_below_one_heading(
    run: Logged,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = EventAccumulator(str(run.folder)).Reload().Tags()["scalars"]
    headings = {tag.partition("/")[0] for tag in tags}
    assert (
        sorted(headings)
        == ["Overview", "Steps", "tables"]
        == sorted(headings, key=str.lower)
    )
    assert (
        len([tag for tag in tags if tag.startswith("Overview/")]) == len(OVERVIEW) == 10
    )
    assert "tables/t_C3/rows" in tags
    assert {curve_name(tensorboard_tag(name)) for name in run.curves} == set(run.curves)


def test_curves_say_what_the_data_says(run: Logged) -> None:
    curves, result = run.curves, run.result
    assert curves["loss/training"].samples == POINTS
    # The windows have the same size, so their mean is the mean of the run.
    assert sum(curves["loss/training"].values) / len(POINTS) == pytest.approx(
        result["train_loss"], rel=1e-5
    )
    for kind in ("AUC", "loss"):
        for part, key in (
            ("validation", "val_auc"),
            ("test", "test_auc" if kind == "AUC" else "test_logloss"),
        ):
            curve = curves[f"{kind}/{part}"]
            assert curve.samples == [2400]
            if (kind, part) != ("loss", "validation"):
                assert curve.values == pytest.approx([result[key]])
    assert all(0 < value < 1 for value in curves["AUC/training"].values)
    for name, rate in (("embeddings", 0.01), ("dense", 0.001)):
        assert curves[f"learning_rate/{name}"].values == pytest.approx(
            [rate] * len(POINTS)
        )
    seen: list[set[int]] = [set() for _ in TABLES]
    lookups, unseen = [0] * len(TABLES), [0] * len(TABLES)
    settings = settings_of()
    for number, batch in enumerate(
        batches_of(settings, Generator(ROWS, 0), range(2400), BATCH, even=True), 1
    ):
        ids = batch.sparse_features.values().view(len(TABLES), -1).tolist()
        for table, of_table in enumerate(map(set, ids)):
            lookups[table] += len(of_table)
            unseen[table] += len(of_table - seen[table])
            seen[table] |= of_table
        if number % EVERY == 0:
            check_point(curves, number // EVERY - 1, seen, lookups, unseen)
            lookups, unseen = [0] * len(TABLES), [0] * len(TABLES)
    assert {name: curves[f"rows/{name}"].values[-1] for name in TABLES} == result[
        "rows"
    ]
    assert {
        name: curves[f"bytes/{name}"].values[-1] for name in TABLES
    } == pytest.approx(result["bytes"])


def check_point(
    curves: dict[str, Curve],
    place: int,
    seen: list[set[int]],
    lookups: list[int],
    unseen: list[int],
) -> None:
    def at(kind: str) -> list[float]:
        return [curves[f"{kind}/{name}"].values[place] for name in [*TABLES, "all"]]

    shares = [
        new / count
        for new, count in zip(
            [*unseen, sum(unseen)], [*lookups, sum(lookups)], strict=True
        )
    ]
    assert at("rows") == [*map(len, seen), sum(map(len, seen))]
    for kind in ("unseen_share", "insert_rate"):
        assert at(kind) == pytest.approx(shares, abs=1e-6)
    assert at("hit_rate") == pytest.approx([1 - new for new in shares], abs=1e-6)
    assert set(at("eviction_rate")) == {0}


def test_the_parts_of_a_step_are_the_whole_of_it(run: Logged) -> None:
    parts = {
        tag: curve.values
        for tag, curve in run.curves.items()
        if tag.startswith("step_ms/")
    }
    assert len(parts) == 5
    assert all(
        value > 0
        for tag in ("input_dist", "lookup", "dense", "update")
        for value in parts[f"step_ms/{tag}"]
    )
    speeds = run.curves["speed/samples_per_second"].values
    for *parts_of_step, speed in zip(*parts.values(), speeds, strict=True):
        assert sum(parts_of_step) == pytest.approx(1e3 * BATCH / speed, rel=1e-4)
    # The rate of the whole run also contains the time between the steps.
    assert (
        2400 / sum(240 / speed for speed in speeds)
        >= run.result["train_samples_per_second"]
    )
    tables, processes = (
        run.curves["memory/tables"].values,
        run.curves["memory/processes"].values,
    )
    assert tables[-1] == pytest.approx(sum(run.result["bytes"].values()))
    assert all(ours < whole for ours, whole in zip(tables, processes, strict=True))


def test_evictions_and_falling_rates_are_seen(bounded: Logged) -> None:
    counts = bounded.result["counts"].values()
    shares = bounded.curves["eviction_rate/all"].values
    assert 0 < max(shares) < 1
    assert max(bounded.curves["rows/t_C25"].values) <= 100
    assert (
        0.2
        < sum(each["evicted"] for each in counts)
        / sum(each["lookups"] for each in counts)
        < 1
    )
    rates = bounded.curves["learning_rate/dense"].values
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0
    assert "learning_rate" in draw(bounded.curves)


def test_all_tables_together_and_since_when(
    bounded: Logged, capsys: pytest.CaptureFixture[str]
) -> None:
    result, counts = bounded.result, bounded.result["counts"].values()
    (foot,) = re.findall(
        r"<tfoot>(.*)</tfoot>", (bounded.folder / "report.html").read_text()
    )
    sums = {
        name: sum(each[name] for each in counts)
        for name in ("lookups", "inserts", "evicted")
    }
    cells = re.findall(r"<td>(.*?)</td>", foot)
    assert cells[:2] == ["all", f"{sum(result['rows'].values()):,}"]
    assert cells[3:] == [
        share(result["hit_rate"]),
        *(f"{number:,}" for number in sums.values()),
    ]
    for step, shown in ((0, False), (1007, True)):
        print_result(Console(), result | {"counts_since_step": step}, {})
        assert (
            "since the run was resumed at step 1,007"
            in " ".join(capsys.readouterr().out.split())
        ) == shown


def test_stock_tables_have_no_lookups_to_tell_of(tmp_path: Path) -> None:
    fused = logged(tmp_path / "log", backend="fused", num_embeddings=100)
    assert not any(tag.startswith(("hit_rate", "unseen_share")) for tag in fused.curves)
    assert {fused.curves[f"rows/{name}"].values[-1] for name in TABLES} == {100}
    assert all(
        fused.curves[f"step_ms/{part}"].values[-1] > 0
        for part in ("input_dist", "lookup", "update")
    )
    assert sorted(draw(fused.curves)) == sorted({*PLOTS} - {"rates", "unseen"})


def test_every_plot_shows_something(run: Logged) -> None:
    plots = draw(run.curves)
    assert sorted(plots) == PLOTS
    lines = {
        "auc": 3,
        "loss": 3,
        "memory": 2,
        "rates": 3,
        "rows": 26,
        "speed": 1,
        "step_time": 5,
        "unseen": 27,
    }
    for name, plot in plots.items():
        drawn = re.findall(r'<poly(?:line|gon) points="([^"]*)"', plot)
        assert len(drawn) == lines[name], name
        for path in drawn:
            points = [tuple(map(float, point.split(","))) for point in path.split()]
            assert all(
                0 <= x <= SIDE + 0.1 and 0 <= y <= SIDE + 0.1 for x, y in points
            ), name
    assert ">21 other tables</tspan>" in plots["rows"]
    # The loss of a point is at its height: the lowest and the highest tick are at the
    # ends of the axis.
    (first, *_), *_ = re.findall(r'<polyline points="([^ ]*) ([^"]*)"', plots["loss"])
    ticks = [
        float(text) for text in re.findall(r'text-anchor="end">([^<]*)<', plots["loss"])
    ]
    height = (ticks[-1] - run.curves["loss/training"].values[0]) / (
        ticks[-1] - ticks[0]
    )
    assert float(first.split(",")[1]) == pytest.approx(height * SIDE, abs=0.1)


def test_a_run_with_one_point_is_drawn(run: Logged) -> None:
    plots = draw(
        {
            tag: Curve(curve.samples[:1], curve.values[:1])
            for tag, curve in run.curves.items()
        }
    )
    assert sorted(plots) == PLOTS
    assert 'h0"' in plots["loss"]


class Page(HTMLParser):
    """Returns the elements of a page. Fails if a tag is not closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_in_itself(run: Logged) -> None:
    page = Page(run.folder / "report.html")
    assert not {"script", "link", "b", "iframe"} & {tag for tag, _ in page.tags}
    texts = []
    for tag, attributes in page.tags:
        assert not {"href", "src"} & attributes.keys()
        if tag == "svg" and "role" in attributes:
            texts.append(attributes["aria-label"] or "")
            assert re.search(r"Last points|at the end|In all", texts[-1])
    assert len(texts) == len(PLOTS)
    written = (
        (run.folder / "report.html")
        .read_text()
        .replace("http://www.w3.org/2000/svg", "")
    )
    assert not re.search(r"url\(|@import|https?:", written)
    assert str(run.folder.absolute()) in page.text
    result = run.result
    for words in (
        *TABLES,
        "batch size",
        "AMD" if "AMD" in Path("/proc/cpuinfo").read_text() else "processor",
    ):
        assert words in page.text
    assert version("torch") in page.text  # without the +cu130 of torch.__version__
    for number in (
        f"{result['test_auc']:.4f}",
        f"{sum(result['rows'].values()):,}",
        f"{result['rows']['t_C26']:,}",
    ):
        assert number in page.text


def test_the_numbers_of_the_page_are_those_of_the_console(run: Logged) -> None:
    page = (run.folder / "report.html").read_text()
    cards = dict(re.findall("<dt>([^<]*)</dt><dd>([^<]*)</dd>", page))
    table_bytes = sum(run.result["bytes"].values())
    process_bytes = run.curves["memory/processes"].values[-1]
    assert cards["memory of tables"] == short_bytes(table_bytes)
    assert cards["memory of processes"] == short_bytes(process_bytes)
    assert cards["training loss, last epoch"] == f"{run.result['train_loss']:.4f}"
    last_loss = run.curves["loss/training"].values[-1]
    assert f"Last points: training {last_loss:.4f}" in page
    caption = (
        f"processes {short_bytes(process_bytes)}, of these, tables"
        f" {short_bytes(run.curves['memory/tables'].values[-1])}"
    )
    assert caption in page


def test_a_page_of_a_run_that_was_killed(run: Logged, tmp_path: Path) -> None:
    folder = shutil.copytree(
        run.folder, tmp_path / "killed", ignore=shutil.ignore_patterns("*.html")
    )
    (events,) = folder.glob("*tfevents*")
    data = events.read_bytes()
    events.write_bytes(data[: len(data) * 6 // 10])
    (folder / "run.json").write_text(json.dumps(read_about(folder) | {"result": None}))
    done = run_forked("report.py", folder)
    assert (done.returncode, done.stdout) == (0, f"{folder}/report.html\n"), done.stderr
    page = Page(folder / "report.html")
    left = len(read_curves(folder)["loss/training"].samples)
    assert 3 < left < 8
    assert (
        f"has not ended: the last point is at {240 * left:,} training samples"
        in page.text
    )
    # The rows are those at that time.
    assert f"{run.curves['rows/t_C26'].values[left - 1]:,.0f}" in page.text
    with pytest.raises(FileNotFoundError, match="no run has written curves there"):
        write_report(tmp_path)


@pytest.mark.slow
def test_a_short_run_has_enough_points(tmp_path: Path) -> None:
    """The number of steps between two points follows from the length of the run."""
    for rows, points in ((300, 4), (15_000, 100)):
        folder = tmp_path / str(rows)
        train_here(settings_of(limit_rows=rows, log_every=None, log_dir=folder, dim=1))
        assert len(read_curves(folder)["loss/training"].samples) == points


@pytest.mark.slow
def test_a_run_that_goes_on_from_an_older_step_has_each_point_once(
    tmp_path: Path,
) -> None:
    """A run is resumed from the beginning, from the middle of an epoch, and from its
    end, which has been validated.
    """
    changes = {"limit_rows": 1500, "epochs": 2, "checkpoint_every": 8, "keep": 100}
    whole = tmp_path / "whole"
    train_here(settings_of(checkpoint=whole, json_out=tmp_path / "out.json", **changes))
    counts = json.loads((tmp_path / "out.json").read_text())["counts"]
    expected = read_curves(whole / "log")
    assert expected["AUC/validation"].samples == [1200, 2400]
    for step in (0, 16, 20):
        part = stopped_after(step, whole, tmp_path / f"part{step}")
        shutil.copytree(whole / "log", part / "log")
        # A run that was killed before its first checkpoint begins again, and so do its
        # curves.
        train_here(
            settings_of(
                checkpoint=part,
                resume=step > 0,
                json_out=tmp_path / "out.json",
                **changes,
            )
        )
        result = json.loads((tmp_path / "out.json").read_text())
        assert result["counts_since_step"] == step
        before = counts["t_C25"]["lookups"] - result["counts"]["t_C25"]["lookups"]
        assert before == (
            0
            if step == 0
            else pytest.approx(counts["t_C25"]["lookups"] * step / 40, rel=0.1)
        )
        since = f"since the run was resumed at step {step}"
        assert (since in Page(part / "log" / "report.html").text) == (step > 0)
        curves = read_curves(part / "log")
        assert list(curves) == list(expected)
        for tag, curve in curves.items():
            assert curve.samples == expected[tag].samples, tag
            if not tag.startswith(("step_ms/", "speed/", "memory/", "bytes/")):
                assert curve.values == expected[tag].values, tag
        assert len(read_about(part / "log")["started"]) == 2
        assert " · resumed 20" in Page(part / "log" / "report.html").text


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limits the size of files to 20 kB, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_costs_the_curves_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_here(
        settings_of(
            log_dir=tmp_path / "log", json_out=tmp_path / "out.json", log_every=1
        )
    )
    assert json.loads((tmp_path / "out.json").read_text())["train_samples"] == 2400
    warnings = [
        line
        for line in capfd.readouterr().err.splitlines()
        if re.match("warning|.*Traceback", line)
    ]
    assert len(warnings) == 2
    assert warnings[0].startswith("warning: no more curves are written: ")
    assert warnings[1].startswith("warning: no report was made: ")
    assert f"'{tmp_path}/log/report.html'" in warnings[1]
    assert read_about(tmp_path / "log")["result"]
    names = [path.name for path in (tmp_path / "log").iterdir()]
    assert sorted(name for name in names if "tfevents" not in name) == ["run.json"]


@pytest.mark.usefixtures("one_rank")
def test_a_disk_that_is_full_from_the_start_is_named_and_nothing_left(
    tmp_path: Path,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(
            DataError, match=r"log: File too large \(--no-log writes no log\)"
        ):
            train(settings_of(log_dir=tmp_path / "log"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "log").iterdir()) == []


def test_what_cannot_be_logged_is_said_before_the_training(
    run: Logged,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def message(**changes: Any) -> str:
        with pytest.raises(DataError) as error:
            train_here(settings_of(**changes))
        assert "epoch" not in capfd.readouterr().err
        return str(error.value)

    assert (
        message(log_dir=run.folder)
        == f"{run.folder} contains the curves of another run: choose another --log-dir"
    )
    instead = "(choose another folder with --log-dir, or write no log with --no-log)"
    assert (
        message(log_dir=Path("/proc/log"))
        == f"/proc/log: No such file or directory {instead}"
    )
    assert (
        message(log_dir=Path(__file__)) == f"{__file__}: this is not a folder {instead}"
    )
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("")
    assert re.fullmatch(
        rf"runs/dlrm-[-\d]+: Not a directory {re.escape(instead)}", message()
    )
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", None
    )  # an import then fails as if the package were missing
    assert "`pip install tensorboard`, or train with --no-log" in message(
        log_dir=tmp_path / "log"
    )
    assert not (tmp_path / "log").exists()


@pytest.mark.usefixtures("one_rank")
def test_two_runs_do_not_share_a_log(tmp_path: Path) -> None:
    settings = settings_of(log_dir=tmp_path / "log")
    with (
        Run("dlrm", settings),
        pytest.raises(DataError, match="log: another run is writing there"),
    ):
        train(settings)


@pytest.mark.slow
def test_by_default_a_new_folder_and_the_result_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = forked(
        "--limit-rows",
        600,
        "--batch-size",
        60,
        "--dim",
        4,
        "--log-every",
        4,
        "--json",
        "-",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert re.fullmatch(r"runs/dlrm-\d{8}-\d{6}", result["log_dir"])
    assert (
        read_curves(Path(result["log_dir"]))["rows/t_C1"].values[-1]
        == result["rows"]["t_C1"]
    )
    assert done.stderr.splitlines()[-1] == f"report: {result['log_dir']}/report.html"
    assert not {"\r", "%"} & {*done.stderr}, "no bars"
    assert "test AUC" in done.stderr


class Terminal:
    """A pseudo-terminal that replaces stderr and records the output."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        self.stderr = os.fdopen(theirs, "w")
        self.said = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._ours, 4096):
                self.said += data
        except OSError:
            pass  # the terminal is closed

    def lines(self) -> list[str]:
        """Closes the terminal and returns all texts that a line has shown."""
        self.stderr.close()
        self._reader.join()
        os.close(self._ours)
        return re.split(r"[\r\n]+", self.said.decode())


def test_a_terminal_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal.stderr)
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"".join(Generator(600, 0).lines(0, 600)))
    settings = settings_of(
        data=path,
        limit_rows=None,
        no_log=True,
        checkpoint=tmp_path / "run",
        resume=True,
    )
    train_here(settings)
    train_here(settings)
    read_only(settings)
    lines = terminal.lines()
    for label, samples in (
        ("epoch 1/1", 480),
        ("validation", 60),
        ("test", 60),
        ("reading", 600),
    ):
        shown = [line for line in lines if line.startswith(f"{label}:")]
        assert shown, label
        # A line has the count, the total, the remaining time and the rate. The last two
        # are not known yet.
        assert re.search(rf"0/{samples}(\.0)? \[00:00<\?, \? samples/s\]", shown[0]), (
            shown[0]
        )
    assert any(line.startswith("checking:") for line in lines)
    for label in ("saving", "loading"):
        assert any(
            re.match(rf"{label} step-000000008: .*rows/s\]", line) for line in lines
        ), label


@pytest.mark.usefixtures("one_rank")
def test_the_auc_of_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Window()
    logits, labels = (
        torch.tensor([[0.1, 2.0, -1.0], [0.1, 3.0, 0.5]]),
        torch.tensor([[0, 1, 1], [1, 0, 0]]),
    )
    for some in zip(logits, labels, strict=True):
        window.add(3, torch.tensor(0.5), *some)
    pairs = [
        (p, n)
        for p in logits[labels == 1].tolist()
        for n in logits[labels == 0].tolist()
    ]
    expected = sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)
    assert window.values({"dense": 1.0})["AUC/training"] == pytest.approx(expected)
    monkeypatch.setattr(measure, "AUC_SAMPLES", 3)
    last = Window()
    for some in zip(logits, labels, strict=True):
        last.add(3, torch.tensor(0.5), *some)
    # only of the second step
    assert last.values({"dense": 1.0})["AUC/training"] == pytest.approx(0)
    one_label = Window()
    one_label.add(3, torch.tensor(0.5), logits[0], torch.ones(3))
    assert "AUC/training" not in one_label.values({"dense": 1.0})


def test_what_is_written_down_of_settings_has_no_password() -> None:
    shown = settings_of(
        max_rows=10, cold_store="redis://user:secret@host:6379/0"
    ).shown()
    assert "host:6379" in str(shown)
    assert "secret" not in str(shown)


def test_a_line_is_not_drawn_across_missing_points() -> None:
    heights = [None, 1.0, 2.0, None, None, 3.0, None, 4.0, 5.0, 6.0, None]
    plot = figure("T", "A text.", [Line("a", list(enumerate(heights)))], "{:g}".format)
    parts = [
        [float(x) for x in re.findall(r"([\d.]+),", part)]
        for part in re.findall(r'polyline points="(.*?)"', plot)
    ]
    assert parts == [[100.0, 200.0], [500.0], [700.0, 800.0, 900.0]]
    assert [float(x) for x in re.findall(r"M([\d.]+) [\d.]+h0", plot)] == [
        100,
        200,
        500,
        700,
        800,
        900,
    ]
    long = figure(
        "T",
        "A text.",
        [Line("a", [*((x, 1.0) for x in range(30)), (30, None), (31, 2.0)])],
        "{:g}".format,
    )
    # A point on its own is a dot.
    assert re.findall(r"M([\d.]+) [\d.]+h0", long) == ["1000.0"]


def test_labels_stand_apart_and_numbers_are_short() -> None:
    for places in ([0.5, 0.5, 0.5], [0.0, 0.01, 0.99, 1.0], [1.0] * 6, [0.2]):
        moved = spread(places, 0.1)
        assert all(after - before > 0.0999 for before, after in pairwise(moved))
        assert moved[0] >= -1e-9
        assert moved[-1] <= 1
    assert spread([0.1, 0.9], 0.1) == [0.1, 0.9]
    assert [short(value) for value in (0, 950, 12_500, 3e6, 1.2e9)] == [
        "0",
        "950",
        "12.5k",
        "3M",
        "1.2B",
    ]
    assert [short_bytes(value) for value in (12, 2.5e9)] == ["12 B", "2.5 GB"]
    assert share(0.123) == "12.3 %"
    assert [plain(value) for value in (None, True, 40_000, 0.25, "x")] == [
        "-",
        "yes",
        "40,000",
        "0.25",
        "x",
    ]
