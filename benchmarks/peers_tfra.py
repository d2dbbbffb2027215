"""The side of TensorFlow Recommenders Addons in peers.py, a process of its own.

It needs the environment that peers.py describes, and imports nothing of this project
but peers_protocol.py. Lookups and steps are ``tf.function`` over unique ids, and the
optimizer is the package's own wrapper of Adagrad.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

# Without its messages on CUDA. The package does not support Keras 3.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
from peers_protocol import Shape, answer
from tensorflow_recommenders_addons import dynamic_embedding as de

BOUND = 0.001


class Tfra:
    """A table in a ``dynamic_embedding.Variable``.

    Args:
        shape: The sizes.
    """

    def __init__(self, shape: Shape) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(shape.threads)
        tf.config.threading.set_inter_op_parallelism_threads(shape.threads)
        self.shape = shape
        self.table = self._variable()
        self.shadow = de.shadow_ops.ShadowVariable(self.table, name="shadow")
        self.optimizer = de.DynamicEmbeddingOptimizer(
            tf.keras.optimizers.legacy.Adagrad(0.01)
        )
        self._lookup = tf.function(self._lookup_unique, reduce_retracing=True)
        self._step = tf.function(self._train, reduce_retracing=True)

    def _variable(self) -> Any:
        # The number of rows is not known before, as for the other growing tables.
        return de.get_variable(
            "table",
            dim=self.shape.dim,
            initializer=tf.keras.initializers.RandomUniform(-BOUND, BOUND, seed=0),
        )

    def _lookup_unique(self, ids: Any) -> Any:
        distinct, places = tf.unique(ids)
        return tf.gather(self.table.lookup(distinct), places)

    def _train(self, ids: Any, gradient: Any) -> None:
        with tf.GradientTape() as tape:
            rows = de.shadow_ops.embedding_lookup_unique(
                self.shadow,
                ids,
                self.shape.dim,
                True,
            )
            loss = tf.reduce_sum(rows * gradient)
        gradients = tape.gradient(loss, [self.shadow])
        self.optimizer.apply_gradients(zip(gradients, [self.shadow], strict=True))

    def fill(self, ids: Any, weights: Any) -> float:
        """Writes rows, and returns the seconds."""
        ids = tf.constant(ids)
        weights = tf.constant(weights)
        begin = time.perf_counter()
        self.table.upsert(ids, weights)
        return time.perf_counter() - begin

    def lookup(self, ids: Any) -> float:
        """Looks ids up, and returns the seconds."""
        ids = tf.constant(ids)
        begin = time.perf_counter()
        self._lookup(ids)
        return time.perf_counter() - begin

    def step(self, ids: Any, gradient: Any) -> float:
        """Looks ids up and updates their rows, and returns the seconds."""
        ids = tf.constant(ids)
        gradient = tf.constant(gradient)
        begin = time.perf_counter()
        self._step(ids, gradient)
        return time.perf_counter() - begin

    def rows(self) -> int:
        """Returns the number of rows."""
        return int(self.table.size())

    def _tables(self) -> list[Any]:
        slot = self.optimizer.get_slot(self.shadow, "accumulator")
        return [self.table, slot.params]

    def save(self, folder: Path) -> float:
        """Saves the rows and their state, and returns the seconds."""
        begin = time.perf_counter()
        for number, table in enumerate(self._tables()):
            path = folder / str(number)
            table.save_to_file_system(str(path))
        return time.perf_counter() - begin

    def load(self, folder: Path) -> float:
        """Loads the rows and their state into empty tables, and returns the seconds."""
        tables = self._tables()
        for table in tables:
            table.clear()
        begin = time.perf_counter()
        for number, table in enumerate(tables):
            path = folder / str(number)
            table.load_from_file_system(str(path))
        return time.perf_counter() - begin

    def check(self, ids: Any) -> list[float]:
        """Returns the first number of the rows of ids."""
        rows = np.asarray(self._lookup(tf.constant(ids)))
        numbers: list[float] = rows[:, 0].tolist()
        return numbers


if __name__ == "__main__":
    answer(Tfra)
