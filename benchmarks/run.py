"""Runs every benchmark, writes ``benchmarks/results.json`` and the table in the README.

python benchmarks/run.py [--only kernel,growth]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from measure import ROOT, run_lanes
from tqdm import tqdm

FOLDER = Path(__file__).resolve().parent
SCRIPTS = ("kernel", "growth", "memory", "store", "dlrm", "checkpoint", "tiers", "service")
ONE_LANE = {"growth", "memory", "store", "checkpoint", "tiers", "service"}  # the table's memory is not malloc's
SCRIPT_OF = {"delta": "checkpoint", "async_save": "checkpoint", "eviction": "tiers", "bounded_memory": "tiers"}
SCRIPT_OF |= {"service_clients": "service", "service_prefetch": "service"}
RESULTS = FOLDER / "results.json"
BEGIN, END = "<!-- benchmarks: written by make bench -->", "<!-- end of benchmarks -->"


def kernel_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A line a case and optimizer, the lanes side by side."""
    lines = [
        "| kernel, over FBGEMM's | forward shipped | forward kept | with backward shipped | with backward kept |",
        "| --- | --- | --- | --- | --- |",
    ]
    lanes = {(r["case"], r["optimizer"], r["lane"]): r for r in rows if r["benchmark"] == "kernel"}
    for case, optimizer in dict.fromkeys((case, optimizer) for case, optimizer, _ in lanes):
        pair = [lanes.get((case, optimizer, lane), {}) for lane in ("shipped", "kept")]
        cells = [f"{r.get(key, '-')}x" for key in ("forward_over_fbgemm", "total_over_fbgemm") for r in pair]
        lines.append(f"| {case}, {optimizer} | " + " | ".join(cells) + " |")
    return lines


def other_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each other figure."""
    lines = ["| figure | measured |", "| --- | --- |"]
    for r in rows:
        if r["benchmark"] == "kernel" and r["case"] == "big" and r["optimizer"] == "rowwise_adagrad":
            lines.append(f"| forward, big, time over the limit's ({r['lane']}) | {r['forward_over_limit']}x |")
        if r["benchmark"] == "growth":
            lines.append(
                f"| growth to {r['rows']:,} rows: slowest step over median (first touch of memory apart) "
                f"| {r['slowest_over_median']}x ({r['slowest_over_median_without_first_touch']}x) |"
            )
            rate = r["new_rows_per_second_without_first_touch"] / 1e6
            lines.append(
                f"| new rows a second, first touch of memory apart (with it) | {rate:.1f}M "
                f"({r['new_rows_per_second'] / 1e6:.1f}M) |"
            )
        if r["benchmark"] == "memory":
            lines.append(f"| resident memory at {r['rows']:,} rows over payload | {r['resident_over_payload']}x |")
        if r["benchmark"] == "store":
            rate = r["million_ids_per_second_one_thread"]["median"]
            lines.append(f"| lookups of {r['batch']} ids at {r['row_bytes']} B, one thread | {rate}M ids/s |")
        if r["benchmark"] == "dlrm":
            where = f"dim {r['dim']}, batch {r['batch_size']}, {r['lane']}"
            lines.append(f"| DLRM step over the dense part alone ({where}) | {r['step_over_dense_alone']}x |")
            lines.append(f"| DLRM samples/s over FUSED ({where}) | {r['samples_per_second_over_fused']}x |")
        if r["benchmark"] == "checkpoint":
            what = f"checkpoint of {r['bytes'] / 1e9:.1f} GB"
            lines.append(
                f"| {what}: save, load over the disk's speed | {r['save_over_disk']}x, {r['load_over_disk']}x |"
            )
            lines.append(
                f"| {what}: load over the disk's speed, the machine's first touch of memory apart "
                f"| {r['load_into_touched_memory_over_disk']}x |"
            )
        if r["benchmark"] == "delta":
            changed = f"delta, {r['rows_changed_and_left'] / r['rows']:.2%} of the rows changed"
            over = f"{r['seconds_over_full']}x, {r['bytes_over_full']}x"
            lines.append(f"| {changed}: time, bytes over a full save's | {over} |")
        if r["benchmark"] == "async_save":
            lines.append(f"| training step during an async_save over one without | {r['mean_step_over_alone']}x |")
    return lines


def bounded_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each figure of tiers.py."""
    lines = []
    for r in rows:
        if r["benchmark"] == "eviction":
            what = f"kernel step of a full table of {r['rows']:,} rows, {r['new_ids'] / r['batch']:.0%} new ids"
            ratios = [f"{r[f'{policy}_over_unbounded']['median']:.2f}x" for policy in ("lru", "lfu")]
            lines.append(f"| {what}: LRU, LFU over one without a bound | {', '.join(ratios)} |")
        if r["benchmark"] == "bounded_memory":
            what = f"resident memory of a table bounded to {r['rows']:,} rows over one of as many without a bound"
            lines.append(f"| {what} | {r['bounded_over_unbounded']}x |")
        if r["benchmark"] == "tiers":
            share = r["rows_in_dram"] / r["ids"]
            what = f"DLRM samples/s, Zipf {r['exponent']} over {r['ids']:,} ids, {share:.0%} in DRAM"
            ratios = [f"{r[f'{side}_over_dram']['median']:.2f}x" for side in ("lost", "rocksdb")]
            lines.append(f"| {what}, the others lost, in RocksDB: over all in DRAM | {', '.join(ratios)} |")
            ratios = [f"{r['cold_reads'][f'{side}_over_rocksdict']}x" for side in ("store", "lookup")]
            lines.append(f"| cold reads/s of the store, of a table, over rocksdict's batch get | {', '.join(ratios)} |")
    return lines


def service_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each figure of service.py."""
    lines = []
    for r in rows:
        what = f"{r.get('ids', 0):,} ids at dim {r.get('dim')} over loopback"
        if r["benchmark"] == "service":
            rates = ", ".join(f"{r[f'million_ids_per_second_{each}']}M" for each in ("pull", "update"))
            over = ", ".join(f"{r[f'{each}_over_in_process']}x" for each in ("pull", "update"))
            lines.append(
                f"| {what}, servers: {r['servers']}: ids/s pulled, updated (time over a table's in the process) "
                f"| {rates} ({over}) |"
            )
        if r["benchmark"] == "service_clients":
            lines.append(
                f"| {what}, {r['clients']} clients, one server: ids/s pulled | {r['million_ids_per_second']}M |"
            )
        if r["benchmark"] == "service_prefetch":
            lines.append(f"| {what}: share of a pull that prefetch hides | {r['share_of_the_pull_hidden']:.0%} |")
    return lines


def write_readme(rows: list[dict[str, Any]]) -> None:
    """Puts the table between the README's marks."""
    path = ROOT / "README.md"
    text = path.read_text()
    r = rows[0]
    commits: dict[str, list[str]] = {}
    for row in rows:
        of = commits.setdefault(row["commit"], [])
        of += [row["benchmark"]] if row["benchmark"] not in of else []
    at = ", ".join(f"{commit} ({', '.join(of)})" for commit, of in commits.items())
    where = f"{r['cpu']}, {r['threads']} threads, torch {r['torch']}, commit {at}; medians."
    table = "\n".join(
        [where, "", *kernel_lines(rows), "", *other_lines(rows), *bounded_lines(rows), *service_lines(rows)]
    )
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    path.write_text(f"{text[:begin]}\n\n{table}\n\n{text[end:]}")


def main() -> None:
    """Runs the benchmarks asked for; figures of the others stay as they were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCRIPTS))
    only = parser.parse_args().only.split(",")
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [row for row in rows if SCRIPT_OF.get(row["benchmark"], row["benchmark"]) not in only]
    for name in tqdm(only, disable=not sys.stderr.isatty()):
        rows += run_lanes(str(FOLDER / f"{name}.py"), lanes=("shipped",) if name in ONE_LANE else ("shipped", "kept"))
    rows.sort(key=lambda row: SCRIPTS.index(SCRIPT_OF.get(row["benchmark"], row["benchmark"])))
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    write_readme(rows)
    print("\n".join([*kernel_lines(rows), "", *other_lines(rows), *bounded_lines(rows), *service_lines(rows)]))


if __name__ == "__main__":
    main()
