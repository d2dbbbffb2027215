r"""Compares RecStore with other tables on CPUs, all sides in turn in one run.

    python3.11 -m venv peers && peers/bin/pip install \
        tensorflow-recommenders-addons==0.8.1 tensorflow==2.16.2 \
        tensorflow-cpu==2.16.2 tf_keras==2.16.0
    python benchmarks/peers.py --tensorflow peers/bin/python

The sides are processes: RecStore; TensorFlow Recommenders Addons (TFRA), with
``tf.function`` over unique ids and its own optimizer; TorchRec's FUSED tables and
managed collision; ``torch.nn.EmbeddingBag(sparse=True)`` with ``SparseAdam``. The others
use element-wise Adagrad. One side works at a time.

- filling: writing given rows in parts, into a table that grows.
- new ids: a training step of a part of ids that have no row yet.
- lookup, step: of ``--ids`` ids that have a row, drawn at random. A step is a lookup
  and its update.
- memory: what the table has added to the process, of each row, with the state.
- save, load: of all rows with their state, by ``state_dict`` and ``torch.save``, and by
  TFRA's ``save_to_file_system``.

Writes ``benchmarks/peers.json``, and the tables of docs/comparison.md and the README.
Takes two to five minutes on two cores. Without ``--tensorflow``, only the tables are
written again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from figures import machine, markdown
from measure import conditions, spread
from peers_protocol import ANSWER, Shape
from run import END, MEASURED, PEERS, load, write_between, write_pages
from tqdm import tqdm

BEGIN = "<!-- peers: written by benchmarks/peers.py -->"
NAMES = {
    "recstore": "RecStore",
    "tfra": "TensorFlow Recommenders Addons",
    "fused": "TorchRec's FUSED",
    "managed": "TorchRec's managed collision",
    "embedding_bag": "`torch.nn.EmbeddingBag`, `SparseAdam`",
}
GROWING = ("recstore", "tfra", "managed")
WARM_UP = 2


class Process:
    """The process of a side.

    Args:
        name: A name of ``NAMES``.
        shape: The sizes.
        tensorflow: The Python of the environment with TFRA.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        tensorflow: str,
    ) -> None:
        folder = Path(__file__).resolve().parent
        command = [sys.executable, str(folder / "peers_torch.py"), name]
        if name == "tfra":
            command = [tensorflow, str(folder / "peers_tfra.py")]
        # Threads that spin after their work would take the cores of the next side.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        if name == "tfra":
            environment.pop("PYTHONPATH", None)
        self.name = name
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send(shape._asdict())

    def _send(self, request: dict[str, Any]) -> None:
        requests = self.process.stdin
        assert requests is not None
        print(json.dumps(request), file=requests, flush=True)

    def ask(self, call: str, step: int = 0) -> Any:
        """Makes a call of the side and returns its result.

        Raises:
            RuntimeError: The process has ended.
        """
        self._send({"call": call, "step": step})
        lines = self.process.stdout
        assert lines is not None
        for line in lines:
            if line.startswith(ANSWER):
                answer = line.removeprefix(ANSWER)
                return json.loads(answer)
        raise RuntimeError(f"the process of {self.name} has ended")

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def planned_calls(shape: Shape, steps: int) -> list[tuple[str, int]]:
    """Returns the calls of each side, and the number that each call gets.

    The first half of the rows is written, and the second half is made by training.
    Fixed tables are trained on all rows, so that their state is in memory as well.
    """
    parts = shape.rows // shape.part
    half = parts // 2

    calls = [("fill", number) for number in range(half)]
    calls += [("new", number) for number in range(half, parts)]
    calls += [("known", number) for number in range(half)]
    for number in range(WARM_UP + steps):
        calls.append(("lookup", number))
        calls.append(("step", number))
    for call in ("memory", "rows", "disk"):
        calls.append((call, 0))
    return calls


def measure(
    shape: Shape,
    tensorflow: str,
    steps: int,
) -> list[dict[str, Any]]:
    """Measures all sides, and returns a JSON row for each."""
    processes = [Process(name, shape, tensorflow) for name in NAMES]
    results_of: dict[str, dict[str, list[Any]]] = {name: {} for name in NAMES}
    calls = planned_calls(shape, steps)
    try:
        for call, number in tqdm(calls, disable=not sys.stderr.isatty()):
            asked_call = "new" if call == "known" else call
            for process in processes:
                result = process.ask(asked_call, number)
                results = results_of[process.name]
                results.setdefault(call, []).append(result)
    finally:
        for process in processes:
            process.end()
    return [row_of(name, shape, results) for name, results in results_of.items()]


def row_of(
    name: str,
    shape: Shape,
    results: dict[str, list[Any]],
) -> dict[str, Any]:
    """Returns the JSON row of a side from the results of its calls."""

    def rows_per_s(call: str) -> int:
        # The first call of a process makes its buffers.
        seconds = results[call][1:]
        return round(shape.part * len(seconds) / sum(seconds))

    memory_bytes = results["memory"][0]
    table_rows = results["rows"][0]
    disk = results["disk"][0]

    row: dict[str, Any] = {
        "benchmark": "peers",
        "side": name,
        **shape._asdict(),
    }
    if results["fill"][0] is not None:
        row["fill_rows_per_s"] = rows_per_s("fill")
    if name in GROWING:
        row["new_rows_per_s"] = rows_per_s("new")
    row["lookup_ms"] = spread(results["lookup"][WARM_UP:])
    row["step_ms"] = spread(results["step"][WARM_UP:])
    row["bytes_per_row"] = round(memory_bytes / table_rows, 1)
    row["save_s"] = round(disk["save_s"], 3)
    row["load_s"] = round(disk["load_s"], 3)
    row["saved_bytes_per_row"] = round(disk["bytes"] / table_rows, 1)
    return {
        **row,
        **conditions(),
        "threads": shape.threads,
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the table of docs/comparison.md and its conditions."""
    if not rows:
        return ["Not measured yet."]
    columns = [
        "",
        "lookup",
        "step",
        "filling",
        "new ids",
        "memory",
        "save",
        "load",
    ]
    lines = []
    for row in rows:
        side = row["side"]
        cells = [NAMES[side]]
        for key in ("lookup_ms", "step_ms"):
            median_ms = row[key]["median"]
            cells.append(f"{median_ms:.1f} ms")
        for key in ("fill_rows_per_s", "new_rows_per_s"):
            speed = "-"
            if key in row:
                speed = f"{row[key] / 1e6:.2f} M rows/s"
            cells.append(speed)
        cells.append(f"{row['bytes_per_row']:.0f} B a row")
        for key in ("save_s", "load_s"):
            cells.append(f"{row[key]:.2f} s")
        lines.append(cells)

    first = rows[0]
    processor = machine(first["cpu"])
    about = (
        f"{first['rows']:,} rows of dim {first['dim']},"
        f" {first['ids']:,} ids in a lookup and in a step,"
        f" {first['threads']} threads on {processor},"
        f" torch {first['torch']}, TensorFlow 2.16.2,"
        f" commit {first['commit']}; medians."
    )
    return [about, "", *markdown(columns, lines)]


def main() -> None:
    """Measures the sides, and writes the results and the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tensorflow", help="the Python of the environment with TFRA")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=int, default=213_000)
    parser.add_argument("--part", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--try",
        action="store_true",
        dest="is_try",
        help="print, and write nothing",
    )
    arguments = parser.parse_args()
    rows = load(PEERS)
    if arguments.tensorflow:
        shape = Shape(
            rows=arguments.rows,
            dim=arguments.dim,
            ids=arguments.ids,
            part=arguments.part,
            threads=arguments.threads,
        )
        rows = measure(shape, arguments.tensorflow, arguments.steps)
    if arguments.is_try:
        print("\n".join(table(rows)))
        return
    if arguments.tensorflow:
        PEERS.write_text(json.dumps(rows, indent=1) + "\n")
    write_between("docs/comparison.md", BEGIN, END, table(rows))
    write_pages(load(MEASURED))


if __name__ == "__main__":
    main()
