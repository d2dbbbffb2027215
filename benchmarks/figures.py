"""Turns the JSON rows of the benchmarks into tables for the pages and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
RESULTS = OTHER
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

_OPTIONS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (
        "options_training",
        "over_plain",
        "a training step, float32, `RowWiseAdagrad`",
        {
            "admission": "`admission=MinFrequency(2)`, 5 % of the ids occur once",
            "expiry": "`expiry=Expiry(40)`, 5 % of the ids occur once",
            "float16": "rows in float16",
            "bfloat16": "rows in bfloat16",
            "bfloat16, stochastic rounding": "rows in bfloat16, `stochastic_rounding`",
            "int8": "rows in int8",
        },
    ),
    (
        "options_new_rows",
        "over_uniform",
        "making rows with `UniformInit`",
        {"NormalInit, truncated": "`NormalInit(truncate_std=2.0)`"},
    ),
    (
        "options_evaluation",
        "over_zeros",
        '`missing="zeros"`, half of the ids without a row',
        {"init": '`missing="init"`'},
    ),
    (
        "options_routing",
        "over_block",
        "TorchRec's split of ids over ranks",
        {"hash": '`routing="hash"`'},
    ),
    (
        "options_optimizers",
        "over_built_in",
        "`Table.update` with the built-in optimizer, bar 1.3x",
        {
            f"{name}{types}": f"`{name}` as a `RowOptimizer`{types}"
            for name in ("Adagrad", "RowWiseAdagrad", "Adam", "Adadelta")
            for types in ("", ", rows in bfloat16, state in float16")
        },
    ),
)


_TRANSPORTS = {
    "TCP": "over loopback TCP",
    "shared memory": "by shared memory",
    "gRPC": "over loopback gRPC",
}


def result_figures(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row of :data:`RESULTS` for each figure of the README's table, which has
    the most important ones.
    """

    def of(benchmark: str, **wanted: Any) -> list[dict[str, Any]]:
        return [
            r
            for r in rows
            if r["benchmark"] == benchmark
            and all(r.get(k) == v for k, v in wanted.items())
        ]

    lines: list[tuple[str, ...]] = []
    for r in of("kernel", case="criteo", optimizer="rowwise_adagrad", lane="kept"):
        what = (
            "speed over FBGEMM's CPU kernel, 26 tables, row-wise Adagrad: forward; with"
            " backward"
        )
        lines.append((what, f"{r['forward_over_fbgemm']}x; {r['total_over_fbgemm']}x"))
    for r in of("dlrm", lane="shipped"):
        what = (
            f"DLRM samples/s over FUSED tables, dim {r['dim']}, batch"
            f" {r['batch_size']:,}"
        )
        lines.append((what, f"{r['samples_per_second_over_fused']}x"))
    for r in of("growth"):
        lines.append(
            ("new rows a second", f"{r['new_rows_per_second'] / 1e6:.1f} million")
        )
    for r in of("memory")[-1:]:
        what = (
            "resident memory over the payload (rows, ids, optimizer state),"
            f" {r['rows']:,} rows"
        )
        lines.append((what, f"{r['resident_over_payload']}x"))
    for r in of("service", transport="shared memory", servers=1):
        what = (
            f"ids a second from a parameter server on the same host, dim {r['dim']}:"
            " pulled; updated"
        )
        rates = [
            f"{r[f'million_ids_per_second_{each}']} million"
            for each in ("pull", "update")
        ]
        lines.append((what, "; ".join(rates)))
    for r in of("serving_delta")[-1:]:
        what = (
            f"applying a delta of {r['changed']:,} rows to a served model of"
            f" {r['rows']:,} rows"
        )
        lines.append((what, f"{r['apply_ms']['median']:.1f} ms"))
    for r in of("serving_stream"):
        lines.append(
            (
                "from a click on a stream to predictions that know it, median",
                f"{r['click_to_served_s']['median']:.1f} s",
            )
        )
    return lines


def kernel_figures(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row of :data:`KERNEL` for each case and optimizer.

    The lanes are columns.
    """
    lines = []
    lanes = {
        (r["case"], r["optimizer"], r["lane"]): r
        for r in rows
        if r["benchmark"] == "kernel"
    }
    for case, optimizer in dict.fromkeys(
        (case, optimizer) for case, optimizer, _ in lanes
    ):
        pair = [lanes.get((case, optimizer, lane), {}) for lane in ("shipped", "kept")]
        cells = [
            f"{r[key]}x" if key in r else "-"
            for key in ("forward_over_fbgemm", "total_over_fbgemm")
            for r in pair
        ]
        lines.append((f"{case}, {optimizer}", *cells))
    return lines


def limit_figures(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row of :data:`LIMIT` for each case and optimizer with ratios to the
    limit.
    """
    lines = []
    lanes = {
        (r["case"], r["optimizer"], r["lane"]): r
        for r in rows
        if "backward_over_limit" in r
    }
    for case, optimizer in dict.fromkeys(
        (case, optimizer) for case, optimizer, _ in lanes
    ):
        pair = [lanes.get((case, optimizer, lane), {}) for lane in ("kept", "avx2")]
        keys = ("forward_over_limit", "forward_ahead_over_limit", "backward_over_limit")
        cells = [f"{r[key]}x" if key in r else "-" for r in pair for key in keys]
        total = pair[0].get("recstore", {}).get("total_ms")
        cells.append(f"{total['p99'] / total['median']:.2f}x" if total else "-")
        lines.append((f"{case}, {optimizer}", *cells))
    return lines


def other_figures(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row of :data:`OTHER` for each other figure."""
    lines: list[tuple[str, ...]] = []
    for r in rows:
        if r["benchmark"] == "growth":
            lines.append(
                (
                    (
                        f"growth to {r['rows']:,} rows: slowest step over the median"
                        " (without the first touch of memory)"
                    ),
                    (
                        f"{r['slowest_over_median']}x"
                        f" ({r['slowest_over_median_without_first_touch']}x)"
                    ),
                )
            )
            rate = r["new_rows_per_second_without_first_touch"] / 1e6
            lines.append(
                (
                    "new rows a second without the first touch of memory (with it)",
                    f"{rate:.1f}M ({r['new_rows_per_second'] / 1e6:.1f}M)",
                )
            )
        if r["benchmark"] == "memory":
            lines.append(
                (
                    f"resident memory at {r['rows']:,} rows over the payload",
                    f"{r['resident_over_payload']}x",
                )
            )
        if r["benchmark"] == "store":
            rate = r["million_ids_per_second_one_thread"]["median"]
            what = f"lookups of {r['batch']} ids at {r['row_bytes']} B, one thread"
            lines.append((what, f"{rate}M ids/s"))
            if "over_index_select" in r:
                over = [
                    f"{r[f'over_index_select{rows}']['median']:.2f}x"
                    for rows in ("_10k_hot_rows", "")
                ]
                which = f"10,000 rows in the cache, {r['rows']:,} rows"
                lines.append(
                    (
                        f"{what}: speed over `torch.index_select(out=)`, {which}",
                        ", ".join(over),
                    )
                )
        if r["benchmark"] == "small":
            what = (
                f"sharded step of batch {r['batch_size']}, dim {r['dim']},"
                f" {r['tables']} tables, one thread"
            )
            lines.append(
                (
                    f"{what}: speed over stock's",
                    f"{r['steps_per_second_over_stock']['median']:.2f}x",
                )
            )
        if r["benchmark"] == "dlrm":
            where = f"dim {r['dim']}, batch {r['batch_size']}, {r['lane']}"
            lines.append(
                (
                    f"DLRM step over a step of the dense part only ({where})",
                    f"{r['step_over_dense_alone']}x",
                )
            )
            lines.append(
                (
                    f"DLRM samples/s over FUSED ({where})",
                    f"{r['samples_per_second_over_fused']}x",
                )
            )
        if r["benchmark"] == "checkpoint":
            what = f"checkpoint of {r['bytes'] / 1e9:.1f} GB"
            lines.append(
                (
                    f"{what}: save, load over the disk's speed",
                    f"{r['save_over_disk']}x, {r['load_over_disk']}x",
                )
            )
            lines.append(
                (
                    (
                        f"{what}: load over the disk's speed, without the first touch"
                        " of memory"
                    ),
                    f"{r['load_into_touched_memory_over_disk']}x",
                )
            )
        if r["benchmark"] == "delta":
            changed = (
                f"delta, {r['rows_changed_and_left'] / r['rows']:.2%} of the rows"
                " changed"
            )
            over = f"{r['seconds_over_full']}x, {r['bytes_over_full']}x"
            lines.append((f"{changed}: time, bytes over those of a full save", over))
        if r["benchmark"] == "async_save":
            lines.append(
                (
                    "training step during an async_save over a step without a save",
                    f"{r['mean_step_over_alone']}x",
                )
            )
        if r["benchmark"] == "plan":
            lines.append(
                (
                    (
                        f"`recstore plan`, ranks: {r['ranks']}: processor time of a"
                        f" step over that of the best plan, of {r['plans']}; resident"
                        " memory over the planned"
                    ),
                    f"{r['chosen_over_best']:.2f}x, {r['memory_over_planned']:.2f}x",
                )
            )
    moves = [r for r in rows if r["benchmark"] == "reshard"]
    if moves:
        r = moves[0]
        what = (
            f"reshard of {r['rows']:,} rows of dim {r['dim']} in place, {r['ranks']}"
            " ranks, the slowest move"
        )
        worst = (
            max(move["seconds"] for move in moves),
            max(move["peak_over_held"] for move in moves),
        )
        lines.append(
            (
                f"{what}: time, peak memory over the rows",
                f"{worst[0]:.2f} s, {worst[1]:.2f}x",
            )
        )
    return [*lines, *_bounded_figures(rows), *_service_figures(rows)]


def _bounded_figures(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row of :data:`OTHER` for each figure of tiers.py."""
    lines: list[tuple[str, ...]] = []
    for r in rows:
        if r["benchmark"] == "eviction":
            what = (
                f"kernel step of a full table of {r['rows']:,} rows,"
                f" {r['new_ids'] / r['batch']:.0%} new ids"
            )
            ratios = [
                f"{r[f'{policy}_over_unbounded']['median']:.2f}x"
                for policy in ("lru", "lfu")
            ]
            lines.append(
                (
                    f"{what}: time with LRU, with LFU, over an unbounded table",
                    ", ".join(ratios),
                )
            )
        if r["benchmark"] == "pauses":
            what = (
                f"kernel step of {r['batch']:,} ids in a full table of {r['rows']:,}"
                " rows"
            )
            most = [f"{r[f'{policy}_max_over_median']}x" for policy in ("lru", "lfu")]
            lines.append(
                (
                    f"{what}: longest step over the median one, with LRU, with LFU",
                    ", ".join(most),
                )
            )
        if r["benchmark"] == "bounded_memory":
            what = (
                f"resident memory of a table bounded to {r['rows']:,} rows over an"
                " unbounded table of as many rows"
            )
            lines.append((what, f"{r['bounded_over_unbounded']}x"))
        if r["benchmark"] == "cold_writes":
            what = (
                f"rows/s of SSDStore over RocksDBStore, {r['rows']:,} cold rows written"
                " again and again"
            )
            faster = (
                r["ssd_rows_per_second"]["median"]
                / r["rocksdb_rows_per_second"]["median"]
            )
            lines.append((what, f"{faster:.1f}x"))
            written = ", ".join(
                f"{r[f'{side}_written_over_changed']:.2f}x"
                for side in ("ssd", "rocksdb")
            )
            lines.append(
                (
                    "bytes written over those of the rows, SSDStore, RocksDBStore",
                    written,
                )
            )
        if r["benchmark"] == "tiers":
            share = r["rows_in_dram"] / r["ids"]
            what = (
                f"DLRM samples/s, Zipf {r['exponent']} over {r['ids']:,} ids,"
                f" {share:.0%} in DRAM"
            )
            ratios = [
                f"{r[f'{side}_over_dram']['median']:.2f}x"
                for side in ("lost", "ssd", "rocksdb")
            ]
            lines.append(
                (
                    (
                        f"{what}, the rest lost, in an SSDStore, in RocksDB: over all"
                        " rows in DRAM"
                    ),
                    ", ".join(ratios),
                )
            )
            for reads, where in (
                ("cold_reads", "in the page cache"),
                ("cold_reads_from_disk", "on the disk"),
            ):
                what = (
                    "cold reads/s of SSDStore, of its table, of RocksDBStore, of its"
                    f" table, all files {where}"
                )
                sides = ("ssd_store", "ssd_lookup", "rocksdb_store", "rocksdb_lookup")
                ratios = [f"{r[reads][f'{side}_over_rocksdict']}x" for side in sides]
                lines.append((f"{what}: over rocksdict's batch get", ", ".join(ratios)))
    return lines


def _service_figures(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row of :data:`OTHER` for each figure of service.py."""
    lines: list[tuple[str, ...]] = []
    for r in rows:
        how = _TRANSPORTS.get(r.get("transport"), "over loopback")
        what = f"{r.get('ids', 0):,} ids at dim {r.get('dim')} {how}"
        if r["benchmark"] == "service":
            rates = ", ".join(
                f"{r[f'million_ids_per_second_{each}']}M" for each in ("pull", "update")
            )
            over = ", ".join(
                f"{r[f'{each}_over_in_process']}x" for each in ("pull", "update")
            )
            lines.append(
                (
                    (
                        f"{what}, servers: {r['servers']}: ids/s of pull, of update"
                        " (time over a table in the process)"
                    ),
                    f"{rates} ({over})",
                )
            )
        if r["benchmark"] == "service_latency":
            p50, p99 = r["pull_ms"]["median"], r["pull_ms"]["p99"]
            lines.append(
                (
                    f"{what}, one client: p50 and p99 of pull",
                    f"{p50:.2f} ms, {p99:.2f} ms",
                )
            )
        if r["benchmark"] == "service_saturation":
            counts = [
                int(key.rpartition("_")[2])
                for key in r
                if key.startswith("pulls_per_second_")
            ]
            which = ", ".join(map(str, counts))
            rates = ", ".join(f"{r[f'pulls_per_second_{count}']:,}" for count in counts)
            over = f"{r['most_pulls_per_second_over_grpc']}x"
            lines.append(
                (
                    f"{what}, clients: {which}: pulls/s (the most of them over gRPC's)",
                    f"{rates} ({over})",
                )
            )
            tails = ", ".join(f"{r[f'p999_over_median_{count}']}x" for count in counts)
            lines.append((f"{what}, clients: {which}: p99.9 of a pull over p50", tails))
        if r["benchmark"] == "service_replicated":
            lines.append(
                (
                    f"{what}: update of a pair of servers over one server",
                    f"{r['pair_over_one']}x",
                )
            )
        if r["benchmark"] == "service_beside":
            what = (
                f"read of {r['ids']} ids beside reads of {r['large_ids']:,} ids,"
                f" {r['where']}: p99 over p99 at rest"
            )
            times = [
                f"{r[f'beside_{which}_table_p99_over_rest']}x"
                for which in ("same", "other")
            ]
            lines.append((f"{what}, for one table, for two tables", ", ".join(times)))
        if r["benchmark"] == "service_clients":
            lines.append(
                (
                    f"{what}, {r['clients']} clients, one server: ids/s of pull",
                    f"{r['million_ids_per_second']}M",
                )
            )
        if r["benchmark"] == "service_dlrm":
            aucs = r["test_auc"]
            lines.append(
                (
                    (
                        f"DLRM on {r['data']}, tables on one server of the host over"
                        " local tables: samples/s; test AUC"
                    ),
                    (
                        f"{r['servers_over_local']}x; {aucs['servers']:.4f},"
                        f" {aucs['local']:.4f}"
                    ),
                )
            )
        if r["benchmark"] == "service_prefetch":
            lines.append(
                (
                    f"{what}: share of a pull that a prefetch hides",
                    f"{r['share_of_the_pull_hidden']:.0%}",
                )
            )
    return lines


def serving_figures(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row of :data:`SERVING` for each figure of serving.py, with the bar of
    the figure.
    """
    lines: list[tuple[str, ...]] = []
    for r in rows:
        if r["benchmark"] == "serving_lookup":
            what = (
                f"ids/s of a served model over the training table's, {r['format']},"
                f" {r['rows']:,} rows, one thread"
            )
            rate = r["million_ids_per_second"]["served"]
            lines.append(
                (
                    what,
                    f"{r['served_over_table']['median']:.2f}x ({rate:.1f}M ids/s)",
                    "at least 0.6x",
                )
            )
        if r["benchmark"] == "serving_delta":
            what = f"delta of {r['changed']:,} changed rows, {r['rows']:,} rows"
            lines.append(
                (
                    f"{what}: making it",
                    f"{r['make_ms']['median']:.0f} ms",
                    "at most 300 ms",
                )
            )
            lines.append(
                (
                    f"{what}: applying it",
                    f"{r['apply_ms']['median']:.1f} ms",
                    "at most 30 ms",
                )
            )
            over = f"{r['p99_delta_each_second_over_at_rest']:.2f}x"
            lines.append(
                (
                    f"{what}: p99 of readers with a delta each second over p99 at rest",
                    over,
                    "at most 1.5x",
                )
            )
            over = f"{r['p99_meanwhile_over_at_rest']:.2f}x"
            lines.append(
                (
                    (
                        f"{what}: p99 of readers with deltas one after the other over"
                        " p99 at rest"
                    ),
                    over,
                    "no bar",
                )
            )
        if r["benchmark"] == "serving_mapped":
            what = f"{r['format']}, {r['rows']:,} rows of dim {r['dim']}"
            over, rate = (
                r["mapped_over_memory"]["median"],
                r["million_ids_per_second"]["mapped"],
            )
            begin = f"ids/s with rows mapped from the file over rows in memory, {what}"
            lines.append((begin, f"{over:.2f}x ({rate:.1f}M ids/s)", "at least 0.9x"))
            lines.append(
                (
                    f"two processes' memory of the mapped file over its size, {what}",
                    f"{r['two_processes_over_file']:.2f}x",
                    "at most 1.05x",
                )
            )
            bar = "at most 1.15x" if r["format"] == "float32" else "at most 1.3x"
            lines.append(
                (
                    f"memory over rows and ids, {what}",
                    f"{r['memory_over_rows_and_ids']:.2f}x",
                    bar,
                )
            )
        if r["benchmark"] == "serving_servers":
            what = (
                "ids/s with rows on a server of the host over rows in memory,"
                f" {r['ids']:,} ids of dim {r['dim']}"
            )
            for transport, over in r["servers_over_memory"].items():
                figure = (
                    f"{over['median']:.2f}x ({r['million_ids_per_second'][transport]:.1f}M"
                    " ids/s)"
                )
                lines.append(
                    (
                        f"{what}, by {transport}",
                        figure,
                        "at least 0.5x" if transport == "shared memory" else "",
                    )
                )
        if r["benchmark"] == "serving_load":
            what = (
                f"loading an export of {r['rows']:,} rows, {r['format']}, over reading"
                " its file"
            )
            lines.append(
                (what, f"{r['load_over_read']['median']:.2f}x", "at most 1.3x")
            )
        if r["benchmark"] == "serving_http":
            what = (
                "prediction of one example over HTTP, a kept connection: p50 over that"
                " of a bare server"
            )
            p50, p99 = r["follow_ms"]["median"], r["follow_ms"]["p99"]
            over = f"{r['p50_over_bare']:.2f}x (p50 {p50:.2f} ms, p99 {p99:.2f} ms)"
            lines.append((what, over, "at most 1.2x"))
        if r["benchmark"] == "serving_publisher":
            what = (
                f"training step with a publisher, every_s={r['every_s']:g}, over a step"
                " without one"
            )
            lines.append(
                (what, f"{r['with_over_alone']['median']:.2f}x", "at most 1.05x")
            )
        if r["benchmark"] == "serving_stream":
            what = (
                f"click on a Redis stream to served, {r['clicks_per_second']:,}"
                f" clicks/s, every_s={r['every_s']:g}"
            )
            seconds = r["click_to_served_s"]
            lines.append(
                (
                    f"{what}: p50, p99",
                    f"{seconds['median']:.1f} s, {seconds['p99']:.1f} s",
                    "3 s, 6 s",
                )
            )
    made = {
        r["rows"]: r["make_ms"]["median"]
        for r in rows
        if r["benchmark"] == "serving_delta"
    }
    if len(made) > 1:
        what = f"making a delta at {max(made):,} rows over {min(made):,} rows"
        lines.append(
            (what, f"{made[max(made)] / made[min(made)]:.2f}x", "0.8x to 1.2x")
        )
    return lines


def cuda_figures(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row of :data:`CUDA` for each side of cuda.py.

    Copies are those of one step.
    """
    lines: list[tuple[str, ...]] = []
    for r in rows:
        if reason := r.get("not_measured") or r.get("error"):
            lines.append((r["side"], reason, *[""] * (len(CUDA) - 2)))
            continue
        copies = [
            f"{r[way]['bytes'] / 1e6:.2f} MB in {r[way]['count']:g}"
            for way in ("up", "down")
        ]
        hidden = "-" if r["overlap"] is None else f"{r['overlap']:.0%}"
        memory = (
            "-" if r["device_bytes"] is None else f"{r['device_bytes'] / 1e9:.2f} GB"
        )
        over = f"{r['step_over_dense_alone']:.2f}x"
        lines.append(
            (r["side"], f"{r['step_ms']['median']:.2f}", over, *copies, hidden, memory)
        )
    return lines


def option_figures(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row of :data:`OPTIONS` for each figure of options.py."""
    lines: list[tuple[str, ...]] = []
    for script, sides, over, names in _OPTIONS:
        for r in (r for r in rows if r["benchmark"] == script):
            for side, ratio in r[sides].items():
                if side != "base_ms":
                    time = (
                        f"{ratio['median']:.2f}x ({ratio['p10']:.2f} to"
                        f" {ratio['p90']:.2f})"
                    )
                    size = (
                        f"{r['bytes_per_row'][side]:.0f}"
                        if "bytes_per_row" in r
                        else ""
                    )
                    lines.append((names.get(side, f"`{side}`"), over, time, size))
    return lines


def tables(
    rows: list[dict[str, Any]],
) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """The tables that ``recstore bench`` prints: the columns and the rows of each one
    that is not empty.
    """
    every = [
        (KERNEL, kernel_figures(rows)),
        (LIMIT, limit_figures(rows)),
        (OTHER, other_figures(rows)),
        (SERVING, serving_figures(rows)),
        (OPTIONS, option_figures(rows)),
    ]
    return [(columns, figures) for columns, figures in every if figures]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    return [
        "| " + " | ".join(line) + " |"
        for line in (columns, ["---"] * len(columns), *rows)
    ]
