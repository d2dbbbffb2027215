"""Turns the JSON rows of the benchmarks into tables for the pages and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
"""A JSON row of a benchmark."""
Cells = tuple[str, ...]
"""A row of a table."""

# The columns of the tables
KERNEL = (
    "kernel, over FBGEMM's",
    "forward shipped",
    "forward kept",
    "with backward shipped",
    "with backward kept",
)
LIMIT = (
    "kernel, over the machine's limit",
    "forward kept",
    "slots ahead",
    "backward",
    "forward avx2",
    "slots ahead",
    "backward",
    "p99 of a step over its median, kept",
)
OTHER = ("figure", "measured")
RESULTS = ("what is measured", "on what", "result")
SERVING = ("figure", "measured", "bar")
CUDA = (
    "tables",
    "ms a step",
    "over the dense part alone",
    "up",
    "down",
    "copies under kernels",
    "device memory",
)
OPTIONS = ("option", "over", "time (10th to 90th percentile)", "bytes a row")


class _OptionTable(NamedTuple):
    """How the ratios of a benchmark of options are shown.

    Attributes:
        benchmark: The name of the benchmark.
        ratios: The key of the ratios in its rows.
        over: What the times are compared with.
        names: The shown name of each side. Default: the name in the row.
    """

    benchmark: str
    ratios: str
    over: str
    names: dict[str, str]


def _row_optimizer_names() -> dict[str, str]:
    """Returns what is measured of each optimizer, by the name of its row."""
    names = {}
    for optimizer in ("Adagrad", "RowWiseAdagrad", "Adam", "Adadelta"):
        for types in ("", ", rows in bfloat16, state in float16"):
            name = f"{optimizer}{types}"
            names[name] = f"`{optimizer}` as a `RowOptimizer`{types}"
    return names


_OPTION_TABLES = (
    _OptionTable(
        benchmark="options_training",
        ratios="over_plain",
        over="a training step, float32, `RowWiseAdagrad`",
        names={
            "admission": "`admission=MinFrequency(2)`, 5 % of the ids occur once",
            "expiry": "`expiry=Expiry(40)`, 5 % of the ids occur once",
            "float16": "rows in float16",
            "bfloat16": "rows in bfloat16",
            "bfloat16, stochastic rounding": "rows in bfloat16, `stochastic_rounding`",
            "int8": "rows in int8",
        },
    ),
    _OptionTable(
        benchmark="options_new_rows",
        ratios="over_uniform",
        over="making rows with `UniformInit`",
        names={"NormalInit, truncated": "`NormalInit(truncate_std=2.0)`"},
    ),
    _OptionTable(
        benchmark="options_evaluation",
        ratios="over_zeros",
        over='`missing="zeros"`, half of the ids without a row',
        names={"init": '`missing="init"`'},
    ),
    _OptionTable(
        benchmark="options_routing",
        ratios="over_block",
        over="TorchRec's split of ids over ranks",
        names={"hash": '`routing="hash"`'},
    ),
    _OptionTable(
        benchmark="options_optimizers",
        ratios="over_built_in",
        over="`Table.update` with the built-in optimizer, bar 1.3x",
        names=_row_optimizer_names(),
    ),
)


_TRANSPORTS = {
    "TCP": "over loopback TCP",
    "shared memory": "by shared memory",
    "gRPC": "over loopback gRPC",
}


def _of(
    rows: Sequence[Row],
    benchmark: str,
    **values: Any,
) -> list[Row]:
    """Returns the rows of a benchmark that have these values."""
    matching = []
    for row in rows:
        values_of_row = {key: row.get(key) for key in values}
        if row["benchmark"] == benchmark and values_of_row == values:
            matching.append(row)
    return matching


def machine(cpu: str) -> str:
    """Returns the processor of a row, such as "2 cores of an AMD EPYC".

    Args:
        cpu: The name of the processor, " x" and the number of its cores.
    """
    name, _, cores = cpu.rpartition(" x")
    name = name.replace("(R)", "")
    name, _, _ = name.partition(" Processor")
    article = "an" if name[:1] in "AEIO" else "a"
    unit = "core" if cores == "1" else "cores"
    return f"{cores} {unit} of {article} {name}"


def result_figures(
    rows: list[Row],
    progressive: list[Row],
    peers: list[Row],
) -> list[Cells]:
    """Returns a row of :data:`RESULTS` for each figure of the README's table.

    They are the most important figures, with default settings.

    Args:
        rows: Those of ``results.json``.
        progressive: Those of ``progressive.json``.
        peers: Those of ``peers.json``.
    """
    lines = _kernel_result(rows)
    for row in _of(rows, "dlrm", lane="shipped"):
        lines.append(
            (
                "samples a second over those with FUSED tables",
                f"training of TorchRec's DLRM, dim {row['dim']}, batch"
                f" {row['batch_size']:,}",
                f"{row['samples_per_second_over_fused']}x",
            )
        )
    lines += _peer_result(peers)
    lines += _progressive_result(progressive)
    for row in _of(rows, "memory")[-1:]:
        lines.append(
            (
                "memory of the process over weights and optimizer state",
                f"a table of {row['rows']:,} rows of dim 64, row-wise Adagrad",
                f"{row['resident_over_payload']}x",
            )
        )
    for row in _of(rows, "serving_stream"):
        median_s = row["click_to_served_s"]["median"]
        lines.append(
            (
                "from a click to predictions that know it, median",
                f"a Redis stream of {row['clicks_per_second']:,} clicks a second,"
                " trained and served on one host",
                f"{median_s:.1f} s",
            )
        )
    return lines


def _kernel_result(rows: list[Row]) -> list[Cells]:
    """Returns the README's line on FBGEMM's kernel."""
    kernel_rows = _of(
        rows,
        "kernel",
        case="criteo",
        optimizer="rowwise_adagrad",
        lane="shipped",
    )
    lines: list[Cells] = []
    for row in kernel_rows:
        forward = row["forward_over_fbgemm"]
        total = row["total_over_fbgemm"]
        lines.append(
            (
                "time of FBGEMM's CPU kernel, which TorchRec's FUSED tables use, over"
                " RecStore's: lookup; lookup and update",
                f"{row['ids']:,} ids of 26 tables of 300,000 rows, dim 64, row-wise"
                " Adagrad",
                f"{forward}x; {total}x",
            )
        )
    return lines


def _peer_result(peers: list[Row]) -> list[Cells]:
    """Returns the README's line on TensorFlow Recommenders Addons."""
    by_side = {row["side"]: row for row in peers}
    if "tfra" not in by_side:
        return []
    ours = by_side["recstore"]
    theirs = by_side["tfra"]
    ratios = []
    for key in ("lookup_ms", "step_ms"):
        ratios.append(theirs[key]["median"] / ours[key]["median"])
    ratios.append(ours["fill_rows_per_s"] / theirs["fill_rows_per_s"])
    results = [f"{ratio:.1f}x" for ratio in ratios]
    figure = (
        "speed over TensorFlow Recommenders Addons: lookup; step with Adagrad; filling"
    )
    table = f"a table of {ours['rows']:,} rows of dim {ours['dim']}"
    # The processor of this run is often not that of the other lines.
    processor = machine(ours["cpu"])
    case = f"{ours['ids']:,} ids of {table}, on {processor}"
    return [(figure, case, "; ".join(results))]


def mean_aucs(progressive: list[Row], log: str) -> dict[str, float]:
    """Returns the mean AUC of each side on a log, over all parts and seeds."""
    means_of_sides: dict[str, list[float]] = {}
    for row in progressive:
        if row["log"] == log:
            aucs = row["auc"]
            means = means_of_sides.setdefault(row["side"], [])
            means.append(sum(aucs) / len(aucs))
    return {side: sum(means) / len(means) for side, means in means_of_sides.items()}


def _progressive_result(progressive: list[Row]) -> list[Cells]:
    """Returns the README's line on ids that come and go."""
    aucs = mean_aucs(progressive, "stream")
    if not aucs:
        return []
    sides = {
        "RecStore, LRU": "RecStore",
        "managed collision, LRU": "managed collision",
        "modulo": "modulo",
        "vocabulary of the first part": "first vocabulary",
    }
    cells = [f"{name} {aucs[side]:.3f}" for side, name in sides.items()]
    figure = "AUC of the next part of a stream, one pass over the data"
    on = "a generated stream whose ids come and go, tables of 0.4 MB"
    return [(figure, on, ", ".join(cells))]


def _ratio(row: Row, key: str) -> str:
    """Returns a ratio of a row, or "-" if the row has none."""
    return f"{row[key]}x" if key in row else "-"


def _by_lane(rows: list[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """Returns rows of the kernel by case and optimizer, and by lane."""
    lanes_of_cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        case = (row["case"], row["optimizer"])
        lanes = lanes_of_cases.setdefault(case, {})
        lanes[row["lane"]] = row
    return lanes_of_cases


def kernel_figures(rows: list[Row]) -> list[Cells]:
    """Returns a row of :data:`KERNEL` for each case and optimizer.

    The lanes are columns.
    """
    lines = []
    lanes_of_cases = _by_lane(_of(rows, "kernel"))
    for (case, optimizer), lanes in lanes_of_cases.items():
        cells = [f"{case}, {optimizer}"]
        for key in ("forward_over_fbgemm", "total_over_fbgemm"):
            for lane in ("shipped", "kept"):
                row = lanes.get(lane, {})
                cells.append(_ratio(row, key))
        lines.append(tuple(cells))
    return lines


def limit_figures(rows: list[Row]) -> list[Cells]:
    """Returns a row of :data:`LIMIT` for each case and optimizer with such ratios."""
    lines = []
    with_limit = [row for row in rows if "backward_over_limit" in row]
    for (case, optimizer), lanes in _by_lane(with_limit).items():
        cells = [f"{case}, {optimizer}"]
        for lane in ("kept", "avx2"):
            row = lanes.get(lane, {})
            cells.append(_ratio(row, "forward_over_limit"))
            cells.append(_ratio(row, "forward_ahead_over_limit"))
            cells.append(_ratio(row, "backward_over_limit"))
        tail = "-"
        if "kept" in lanes:
            total_ms = lanes["kept"]["recstore"]["total_ms"]
            p99_over_median = total_ms["p99"] / total_ms["median"]
            tail = f"{p99_over_median:.2f}x"
        cells.append(tail)
        lines.append(tuple(cells))
    return lines


def other_figures(rows: list[Row]) -> list[Cells]:
    """Returns a row of :data:`OTHER` for each other figure."""
    return [
        *_lines(rows, _OTHER_FIGURES),
        *_reshard(_of(rows, "reshard")),
        *_lines(rows, _BOUNDED_FIGURES),
        *_lines(rows, _SERVICE_FIGURES),
    ]


def serving_figures(rows: list[Row]) -> list[Cells]:
    """Returns a row of :data:`SERVING` for each figure of serving.py, with its bar."""
    return [
        *_lines(rows, _SERVING_FIGURES),
        *_serving_delta_sizes(_of(rows, "serving_delta")),
    ]


def _lines(
    rows: list[Row],
    figures: dict[str, Callable[[Row], list[Cells]]],
) -> list[Cells]:
    """Returns the lines of the rows' benchmarks."""
    lines: list[Cells] = []
    for row in rows:
        benchmark = row["benchmark"]
        if benchmark in figures:
            figures_of = figures[benchmark]
            lines += figures_of(row)
    return lines


# ---- Figures of one row of a benchmark ----


def _growth(row: Row) -> list[Cells]:
    rate = row["new_rows_per_second"] / 1e6
    touched_rate = row["new_rows_per_second_without_first_touch"] / 1e6
    slowest = row["slowest_over_median"]
    touched_slowest = row["slowest_over_median_without_first_touch"]
    return [
        (
            f"growth to {row['rows']:,} rows: slowest step over the median (without the"
            " first touch of memory)",
            f"{slowest}x ({touched_slowest}x)",
        ),
        (
            "new rows a second without the first touch of memory (with it)",
            f"{touched_rate:.1f}M ({rate:.1f}M)",
        ),
    ]


def _memory(row: Row) -> list[Cells]:
    figure = f"resident memory at {row['rows']:,} rows over the payload"
    return [(figure, f"{row['resident_over_payload']}x")]


def _store(row: Row) -> list[Cells]:
    figure = f"lookups of {row['batch']} ids at {row['row_bytes']} B, one thread"
    rate = row["million_ids_per_second_one_thread"]["median"]
    lines = [(figure, f"{rate}M ids/s")]
    if "over_index_select" in row:
        hot = row["over_index_select_10k_hot_rows"]["median"]
        every = row["over_index_select"]["median"]
        lines.append(
            (
                f"{figure}: speed over `torch.index_select(out=)`, 10,000 rows in the"
                f" cache, {row['rows']:,} rows",
                f"{hot:.2f}x, {every:.2f}x",
            )
        )
    return lines


def _small(row: Row) -> list[Cells]:
    figure = (
        f"sharded step of batch {row['batch_size']}, dim {row['dim']},"
        f" {row['tables']} tables, one thread: speed over stock's"
    )
    return [(figure, f"{row['steps_per_second_over_stock']['median']:.2f}x")]


def _dlrm(row: Row) -> list[Cells]:
    case = f"dim {row['dim']}, batch {row['batch_size']}, {row['lane']}"
    return [
        (
            f"DLRM step over a step of the dense part only ({case})",
            f"{row['step_over_dense_alone']}x",
        ),
        (
            f"DLRM samples/s over FUSED ({case})",
            f"{row['samples_per_second_over_fused']}x",
        ),
    ]


def _device_host(row: Row) -> list[Cells]:
    total_ms = row["device"]["total_ms"]["median"]
    resolve_ms = row["resolve"]["total_ms"]["median"]
    backward_ms = row["host"]["backward_ms"]["median"]
    lines = [
        (
            "host's part of a step whose rows are on a device, over resolving ids and a"
            " backward on the host",
            f"{total_ms / (resolve_ms + backward_ms):.2f}x ({total_ms:.1f} ms)",
        )
    ]
    if "modelled_ms" in row:
        figure = f"the same part with {row['cores']} such cores, by Amdahl's law"
        lines.append((figure, f"{row['modelled_ms']:.1f} ms"))
    return lines


def _checkpoint(row: Row) -> list[Cells]:
    figure = f"checkpoint of {row['bytes'] / 1e9:.1f} GB"
    return [
        (
            f"{figure}: save, load over the disk's speed",
            f"{row['save_over_disk']}x, {row['load_over_disk']}x",
        ),
        (
            f"{figure}: load over the disk's speed, without the first touch of memory",
            f"{row['load_into_touched_memory_over_disk']}x",
        ),
    ]


def _delta(row: Row) -> list[Cells]:
    changed = row["rows_changed_and_left"] / row["rows"]
    figure = (
        f"delta, {changed:.2%} of the rows changed: time, bytes over those of a full"
        " save"
    )
    return [(figure, f"{row['seconds_over_full']}x, {row['bytes_over_full']}x")]


def _async_save(row: Row) -> list[Cells]:
    figure = "training step during an async_save over a step without a save"
    return [(figure, f"{row['mean_step_over_alone']}x")]


def _plan(row: Row) -> list[Cells]:
    figure = (
        f"`recstore plan`, ranks: {row['ranks']}: processor time of a step over that of"
        f" the best plan, of {row['plans']}; resident memory over the planned"
    )
    ratios = f"{row['chosen_over_best']:.2f}x, {row['memory_over_planned']:.2f}x"
    return [(figure, ratios)]


def _reshard(moves: list[Row]) -> list[Cells]:
    if not moves:
        return []
    row = moves[0]
    figure = (
        f"reshard of {row['rows']:,} rows of dim {row['dim']} in place,"
        f" {row['ranks']} ranks, the slowest move: time, peak memory over the rows"
    )
    slowest = max(move["seconds"] for move in moves)
    peak = max(move["peak_over_held"] for move in moves)
    return [(figure, f"{slowest:.2f} s, {peak:.2f}x")]


# ---- Figures of tiers.py ----


def _eviction(row: Row) -> list[Cells]:
    new = row["new_ids"] / row["batch"]
    figure = (
        f"kernel step of a full table of {row['rows']:,} rows,"
        f" {new:.0%} new ids:"
        " time with LRU, with LFU, over an unbounded table"
    )
    lru = row["lru_over_unbounded"]["median"]
    lfu = row["lfu_over_unbounded"]["median"]
    return [(figure, f"{lru:.2f}x, {lfu:.2f}x")]


def _pauses(row: Row) -> list[Cells]:
    figure = (
        f"kernel step of {row['batch']:,} ids in a full table of {row['rows']:,} rows:"
        " longest step over the median one, with LRU, with LFU"
    )
    return [(figure, f"{row['lru_max_over_median']}x, {row['lfu_max_over_median']}x")]


def _bounded_memory(row: Row) -> list[Cells]:
    figure = (
        f"resident memory of a table bounded to {row['rows']:,} rows over an unbounded"
        " table of as many rows"
    )
    return [(figure, f"{row['bounded_over_unbounded']}x")]


def _cold_writes(row: Row) -> list[Cells]:
    ssd = row["ssd_rows_per_second"]["median"]
    rocksdb = row["rocksdb_rows_per_second"]["median"]
    ssd_written = row["ssd_written_over_changed"]
    rocksdb_written = row["rocksdb_written_over_changed"]
    return [
        (
            f"rows/s of SSDStore over RocksDBStore, {row['rows']:,} cold rows written"
            " again and again",
            f"{ssd / rocksdb:.1f}x",
        ),
        (
            "bytes written over those of the rows, SSDStore, RocksDBStore",
            f"{ssd_written:.2f}x, {rocksdb_written:.2f}x",
        ),
    ]


def _tiers(row: Row) -> list[Cells]:
    share = row["rows_in_dram"] / row["ids"]
    figure = (
        f"DLRM samples/s, Zipf {row['exponent']} over {row['ids']:,} ids,"
        f" {share:.0%} in DRAM,"
        " the rest lost, in an SSDStore, in RocksDB: over all rows in DRAM"
    )
    lost = row["lost_over_dram"]["median"]
    ssd = row["ssd_over_dram"]["median"]
    rocksdb = row["rocksdb_over_dram"]["median"]
    return [
        (figure, f"{lost:.2f}x, {ssd:.2f}x, {rocksdb:.2f}x"),
        _cold_reads(row["cold_reads"], "in the page cache"),
        _cold_reads(row["cold_reads_from_disk"], "on the disk"),
    ]


def _cold_reads(reads: Row, place: str) -> Cells:
    figure = (
        "cold reads/s of SSDStore, of its table, of RocksDBStore, of its table, all"
        f" files {place}: over rocksdict's batch get"
    )
    ratios = []
    for side in ("ssd_store", "ssd_lookup", "rocksdb_store", "rocksdb_lookup"):
        ratio = reads[f"{side}_over_rocksdict"]
        ratios.append(f"{ratio}x")
    return (figure, ", ".join(ratios))


# ---- Figures of service.py ----


def _request(row: Row) -> str:
    """Returns the ids of a request and its transport."""
    ids = row.get("ids", 0)
    dim = row.get("dim")
    transport = _TRANSPORTS.get(row.get("transport", ""), "over loopback")
    return f"{ids:,} ids at dim {dim} {transport}"


def _service(row: Row) -> list[Cells]:
    figure = (
        f"{_request(row)}, servers: {row['servers']}: ids/s of pull, of update (time"
        " over a table in the process)"
    )
    pull = row["million_ids_per_second_pull"]
    update = row["million_ids_per_second_update"]
    pull_over = row["pull_over_in_process"]
    update_over = row["update_over_in_process"]
    return [(figure, f"{pull}M, {update}M ({pull_over}x, {update_over}x)")]


def _service_latency(row: Row) -> list[Cells]:
    figure = f"{_request(row)}, one client: p50 and p99 of pull"
    pull_ms = row["pull_ms"]
    p50 = pull_ms["median"]
    p99 = pull_ms["p99"]
    return [(figure, f"{p50:.2f} ms, {p99:.2f} ms")]


def _service_saturation(row: Row) -> list[Cells]:
    prefix = "pulls_per_second_"
    counts = []
    rates = []
    tails = []
    for key, rate in row.items():
        if key.startswith(prefix):
            count = key.removeprefix(prefix)
            tail = row[f"p999_over_median_{count}"]
            counts.append(count)
            rates.append(f"{rate:,}")
            tails.append(f"{tail}x")
    figure = f"{_request(row)}, clients: {', '.join(counts)}"
    over_grpc = row["most_pulls_per_second_over_grpc"]
    return [
        (
            f"{figure}: pulls/s (the most of them over gRPC's)",
            f"{', '.join(rates)} ({over_grpc}x)",
        ),
        (
            f"{figure}: p99.9 of a pull over p50",
            ", ".join(tails),
        ),
    ]


def _service_replicated(row: Row) -> list[Cells]:
    figure = f"{_request(row)}: update of a pair of servers over one server"
    return [(figure, f"{row['pair_over_one']}x")]


def _service_beside(row: Row) -> list[Cells]:
    figure = (
        f"read of {row['ids']} ids beside reads of {row['large_ids']:,} ids,"
        f" {row['where']}: p99 over p99 at rest, for one table, for two tables"
    )
    same = row["beside_same_table_p99_over_rest"]
    other = row["beside_other_table_p99_over_rest"]
    return [(figure, f"{same}x, {other}x")]


def _service_clients(row: Row) -> list[Cells]:
    figure = f"{_request(row)}, {row['clients']} clients, one server: ids/s of pull"
    return [(figure, f"{row['million_ids_per_second']}M")]


def _service_dlrm(row: Row) -> list[Cells]:
    figure = (
        f"DLRM on {row['data']}, tables on one server of the host over local tables:"
        " samples/s; test AUC"
    )
    aucs = row["test_auc"]
    ratio = f"{row['servers_over_local']}x"
    return [(figure, f"{ratio}; {aucs['servers']:.4f}, {aucs['local']:.4f}")]


def _service_prefetch(row: Row) -> list[Cells]:
    figure = f"{_request(row)}: share of a pull that a prefetch hides"
    return [(figure, f"{row['share_of_the_pull_hidden']:.0%}")]


# ---- Figures of serving.py ----


def _serving_lookup(row: Row) -> list[Cells]:
    figure = (
        f"ids/s of a served model over the training table's, {row['format']},"
        f" {row['rows']:,} rows, one thread"
    )
    over = row["served_over_table"]["median"]
    rate = row["million_ids_per_second"]["served"]
    return [(figure, f"{over:.2f}x ({rate:.1f}M ids/s)", "at least 0.6x")]


def _serving_delta(row: Row) -> list[Cells]:
    figure = f"delta of {row['changed']:,} changed rows, {row['rows']:,} rows"
    make_ms = row["make_ms"]["median"]
    apply_ms = row["apply_ms"]["median"]
    p99_each_second = row["p99_delta_each_second_over_at_rest"]
    p99_always = row["p99_meanwhile_over_at_rest"]
    return [
        (
            f"{figure}: making it",
            f"{make_ms:.0f} ms",
            "at most 300 ms",
        ),
        (
            f"{figure}: applying it",
            f"{apply_ms:.1f} ms",
            "at most 30 ms",
        ),
        (
            f"{figure}: p99 of readers with a delta each second over p99 at rest",
            f"{p99_each_second:.2f}x",
            "at most 1.5x",
        ),
        (
            f"{figure}: p99 of readers with deltas one after the other over p99 at"
            " rest",
            f"{p99_always:.2f}x",
            "no bar",
        ),
    ]


def _serving_delta_sizes(rows: list[Row]) -> list[Cells]:
    make_ms = {row["rows"]: row["make_ms"]["median"] for row in rows}
    if len(make_ms) < 2:
        return []
    largest = max(make_ms)
    smallest = min(make_ms)
    figure = f"making a delta at {largest:,} rows over {smallest:,} rows"
    ratio = make_ms[largest] / make_ms[smallest]
    return [(figure, f"{ratio:.2f}x", "0.8x to 1.2x")]


def _serving_mapped(row: Row) -> list[Cells]:
    case = f"{row['format']}, {row['rows']:,} rows of dim {row['dim']}"
    over = row["mapped_over_memory"]["median"]
    rate = row["million_ids_per_second"]["mapped"]
    memory_bar = "at most 1.15x" if row["format"] == "float32" else "at most 1.3x"
    return [
        (
            f"ids/s with rows mapped from the file over rows in memory, {case}",
            f"{over:.2f}x ({rate:.1f}M ids/s)",
            "at least 0.9x",
        ),
        (
            f"two processes' memory of the mapped file over its size, {case}",
            f"{row['two_processes_over_file']:.2f}x",
            "at most 1.05x",
        ),
        (
            f"memory over rows and ids, {case}",
            f"{row['memory_over_rows_and_ids']:.2f}x",
            memory_bar,
        ),
    ]


def _serving_servers(row: Row) -> list[Cells]:
    figure = (
        "ids/s with rows on a server of the host over rows in memory,"
        f" {row['ids']:,} ids of dim {row['dim']}"
    )
    lines = []
    for transport, over in row["servers_over_memory"].items():
        rate = row["million_ids_per_second"][transport]
        measured = f"{over['median']:.2f}x ({rate:.1f}M ids/s)"
        bar = "at least 0.5x" if transport == "shared memory" else ""
        lines.append((f"{figure}, by {transport}", measured, bar))
    return lines


def _serving_load(row: Row) -> list[Cells]:
    figure = (
        f"loading an export of {row['rows']:,} rows, {row['format']}, over reading its"
        " file"
    )
    return [(figure, f"{row['load_over_read']['median']:.2f}x", "at most 1.3x")]


def _serving_http(row: Row) -> list[Cells]:
    figure = (
        "prediction of one example over HTTP, a kept connection: p50 over that of a"
        " bare server"
    )
    p50 = row["follow_ms"]["median"]
    p99 = row["follow_ms"]["p99"]
    measured = f"{row['p50_over_bare']:.2f}x (p50 {p50:.2f} ms, p99 {p99:.2f} ms)"
    return [(figure, measured, "at most 1.2x")]


def _serving_publisher(row: Row) -> list[Cells]:
    figure = (
        f"training step with a publisher, every_s={row['every_s']:g}, over a step"
        " without one"
    )
    return [(figure, f"{row['with_over_alone']['median']:.2f}x", "at most 1.05x")]


def _serving_stream(row: Row) -> list[Cells]:
    figure = (
        f"click on a Redis stream to served, {row['clicks_per_second']:,} clicks/s,"
        f" every_s={row['every_s']:g}: p50, p99"
    )
    seconds = row["click_to_served_s"]
    measured = f"{seconds['median']:.1f} s, {seconds['p99']:.1f} s"
    return [(figure, measured, "3 s, 6 s")]


_OTHER_FIGURES = {
    "growth": _growth,
    "memory": _memory,
    "store": _store,
    "small": _small,
    "dlrm": _dlrm,
    "device_host": _device_host,
    "checkpoint": _checkpoint,
    "delta": _delta,
    "async_save": _async_save,
    "plan": _plan,
}
_BOUNDED_FIGURES = {
    "eviction": _eviction,
    "pauses": _pauses,
    "bounded_memory": _bounded_memory,
    "cold_writes": _cold_writes,
    "tiers": _tiers,
}
_SERVICE_FIGURES = {
    "service": _service,
    "service_latency": _service_latency,
    "service_saturation": _service_saturation,
    "service_replicated": _service_replicated,
    "service_beside": _service_beside,
    "service_clients": _service_clients,
    "service_dlrm": _service_dlrm,
    "service_prefetch": _service_prefetch,
}
_SERVING_FIGURES = {
    "serving_lookup": _serving_lookup,
    "serving_delta": _serving_delta,
    "serving_mapped": _serving_mapped,
    "serving_servers": _serving_servers,
    "serving_load": _serving_load,
    "serving_http": _serving_http,
    "serving_publisher": _serving_publisher,
    "serving_stream": _serving_stream,
}


# ---- The other tables ----


def cuda_figures(rows: list[Row]) -> list[Cells]:
    """Returns a row of :data:`CUDA` for each side of cuda.py.

    Copies are those of one step.
    """
    lines: list[Cells] = []
    for row in rows:
        reason = row.get("not_measured") or row.get("error")
        if reason:
            empty = [""] * (len(CUDA) - 2)
            lines.append((row["side"], reason, *empty))
            continue
        step_ms = row["step_ms"]["median"]
        overlap = "-"
        if row["overlap"] is not None:
            overlap = f"{row['overlap']:.0%}"
        memory = "-"
        if row["device_bytes"] is not None:
            memory = f"{row['device_bytes'] / 1e9:.2f} GB"
        lines.append(
            (
                row["side"],
                f"{step_ms:.2f}",
                f"{row['step_over_dense_alone']:.2f}x",
                _copies(row["up"]),
                _copies(row["down"]),
                overlap,
                memory,
            )
        )
    return lines


def _copies(way: Row) -> str:
    return f"{way['bytes'] / 1e6:.2f} MB in {way['count']:g}"


def option_figures(rows: list[Row]) -> list[Cells]:
    """Returns a row of :data:`OPTIONS` for each figure of options.py."""
    lines: list[Cells] = []
    for table in _OPTION_TABLES:
        for row in _of(rows, table.benchmark):
            for side, ratio in row[table.ratios].items():
                if side == "base_ms":
                    continue
                p10_to_p90 = f"{ratio['p10']:.2f} to {ratio['p90']:.2f}"
                row_bytes = ""
                if "bytes_per_row" in row:
                    row_bytes = f"{row['bytes_per_row'][side]:.0f}"
                lines.append(
                    (
                        table.names.get(side, f"`{side}`"),
                        table.over,
                        f"{ratio['median']:.2f}x ({p10_to_p90})",
                        row_bytes,
                    )
                )
    return lines


def tables(rows: list[Row]) -> list[tuple[Cells, list[Cells]]]:
    """Returns the tables that ``recstore bench`` prints.

    Each is (columns, rows). Empty tables are left out.
    """
    figures_of_columns = [
        (KERNEL, kernel_figures(rows)),
        (LIMIT, limit_figures(rows)),
        (OTHER, other_figures(rows)),
        (SERVING, serving_figures(rows)),
        (OPTIONS, option_figures(rows)),
    ]
    return [(columns, figures) for columns, figures in figures_of_columns if figures]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    rule = ["---"] * len(columns)
    lines = []
    for cells in (columns, rule, *rows):
        content = " | ".join(cells)
        lines.append(f"| {content} |")
    return lines
