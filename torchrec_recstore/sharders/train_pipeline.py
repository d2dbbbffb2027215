"""A train pipeline that prepares the rows of the next batch, also on the CPU.

Tests: tests/distributed/test_train_pipeline.py, tests/distributed/test_pipeline_events.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from torchrec_recstore.torchrec_seams.pipelines import PrefetchPipelineSeams


class RecStorePrefetchPipeline(PrefetchPipelineSeams):
    """A train pipeline with prefetch that also prefetches rows without CUDA streams.

    On the CPU, a thread makes the missing rows of the next batch, resolves its ids to
    slots, and reads its rows from cold stores, while the current batch runs the dense
    layers and the backward pass. (TorchRec's ``PrefetchTrainPipelineSparseDist`` does
    not prefetch on the CPU, torchrec 1.8.0.) The losses are the same, step by step, as
    in a training loop without pipeline: the weights of a new row do not depend on when
    it is made, and tables with ``max_rows`` or ``admission`` make their rows in the
    step.

    On an accelerator, the ids of the next batch are on the host, and its rows are
    prepared, before the backward pass of the current batch begins. On CUDA, TorchRec's
    pipeline does this on its stream for prefetches. The arguments of the constructor
    are those of ``PrefetchTrainPipelineSparseDist``.

    Up to two batches are in flight between two steps. They are trained in their order,
    also after ``detach()``, with another iterator, and after an error. A direct call of
    the model detaches the pipeline, and the next :meth:`progress` attaches it again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._thread = ThreadPoolExecutor(1, "recstore_prefetch")
        self._prefetching: list[Future[None]] = []

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Trains the model on one batch, and returns the output of the model.

        If the call raises an error, the batch was not trained, unless the error is one
        of the optimizer's step. The next call takes the same batch again;
        ``dequeue_batch()`` leaves it out, and ``reset()`` drops all batches in flight.

        Raises:
            StopIteration: There is no batch left.
            RuntimeError: Batches of another iterator are in flight, and were loaded
                while the model was in another mode (training or evaluation). Nothing
                has changed.
            MemoryError: There is not enough memory for the rows of a prefetched batch.
            ColdStoreError: The rows of a prefetched batch cannot be read from a cold
                store.
        """
        return super().progress(dataloader_iter)

    def finish_prefetch(self) -> None:
        """Waits until the rows of the batches in flight are prepared.

        Raises the error of the preparation.
        """
        # The next forward finds all rows, and result() raises the errors of the thread.
        while self._prefetching:
            self._prefetching.pop(0).result()

    def prefetch_without_stream(
        self,
        module: Any,
        features: Any,
        device: torch.device,
    ) -> None:
        """Prepares the rows of the next batch.

        On the CPU it is done in a thread, on an accelerator before backward begins.
        """
        if device.type == "cpu":
            self._prefetching.append(self._thread.submit(module.prefetch, features))
            return
        # The device is busy with the forward; the host would only wait for it.
        prefetched: Future[None] = Future()
        try:
            module.prefetch(features)
            prefetched.set_result(None)
        except Exception as error:
            # It is an error of the next step, and this step goes on.
            prefetched.set_exception(error)
        self._prefetching.append(prefetched)
