"""A train pipeline that makes or fetches the next batch's rows while this one computes, on the CPU too."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext

from torchrec_recstore.torchrec_seams import PrefetchPipelineSeams


class RecStorePrefetchPipeline(PrefetchPipelineSeams):
    """TorchRec's ``PrefetchTrainPipelineSparseDist``, whose prefetch also runs where there are no CUDA streams.

    On the CPU a thread makes the next batch's missing rows beside this batch's backward and dense layers, and reads
    those that lie in cold stores. Losses are those of a loop without pipeline, step by step: a new row's weights do not
    depend on when it is made, and tables with ``max_rows`` or ``admission`` make theirs in the step itself. TorchRec's
    own returns from its prefetch at once there (torchrec 1.8.0). On CUDA it is TorchRec's pipeline, and rows are made
    by its prefetch hook. The constructor takes the same arguments.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._thread = ThreadPoolExecutor(1, "recstore_prefetch")
        self._prefetching: list[Future[None]] = []

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Trains on one batch.

        Args:
            dataloader_iter: gives the batches.

        Returns:
            The model's output.

        Raises:
            StopIteration: there is no batch left.
            MemoryError: no room for the rows of a batch that was prefetched.
            ColdStoreError: a cold store could not be read for it.
        """
        self._finish_prefetch()
        return super().progress(dataloader_iter)

    def _finish_prefetch(self) -> None:
        # The forward that follows finds all rows there; and what went wrong is said.
        while self._prefetching:
            self._prefetching.pop(0).result()

    def prefetch_without_stream(self, context: PrefetchTrainPipelineContext) -> None:
        """Makes the rows of the next batch in a thread."""
        for module in self.pipelined_modules:
            name = module.forward.name
            features = context.input_dist_tensors_requests.pop(name).wait()
            context.module_input_post_prefetch[name] = features
            context.module_contexts_post_prefetch[name] = context.module_contexts.pop(name)
            if self.trains:
                self._prefetching.append(self._thread.submit(module.prefetch, features))
