"""The private parts of TorchRec's train pipelines.

Tests: tests/distributed/test_train_pipeline.py, tests/distributed/test_pipeline_events.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.train_pipeline.pipeline_context import (
    PrefetchTrainPipelineContext,
)
from torchrec.distributed.train_pipeline.runtime_forwards import (
    PrefetchPipelinedForward,
)
from torchrec.distributed.train_pipeline.train_pipelines import (
    PrefetchTrainPipelineSparseDist,
)


def _no_pipeline() -> None:
    return None


@dataclass
class BatchContext(PrefetchTrainPipelineContext):  # type: ignore[misc]
    """What a pipeline has begun for one batch.

    Args:
        pipeline: Returns the pipeline of the batch, or None if the pipeline no longer
            exists.
        distributed: Whether the input distribution of the batch has been started.
        prefetched: Whether the input distribution has ended and the rows are being
            prefetched.
    """

    pipeline: Callable[[], PrefetchPipelineSeams | None] = field(default=_no_pipeline)
    distributed: bool = False
    prefetched: bool = False


class _Forward(PrefetchPipelinedForward):  # type: ignore[misc]
    """The forward of a pipelined module.

    It is that of TorchRec within a step, and the module's own outside of a step.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pipeline = self._context.pipeline()
        if pipeline is None or pipeline.in_step:
            return super().__call__(*args, **kwargs)
        # TorchRec's forward would return the embeddings of the next batch of the
        # pipeline, whatever the arguments are.
        pipeline.detach()
        return self._module.forward(*args, **kwargs)


class _BeforeForward:
    """The hook that tells a pipeline of calls of its model.

    A copy of the model, such as an export makes of its dense layers, belongs to no
    pipeline. So a copy of the hook does nothing, and a model with the hook can be
    copied and pickled without its pipeline.
    """

    def __init__(
        self, pipeline: Callable[[], PrefetchPipelineSeams | None] = _no_pipeline
    ) -> None:
        self._pipeline = pipeline

    def __call__(self, *_: Any) -> None:
        pipeline = self._pipeline()
        if pipeline is not None:
            pipeline.before_forward()

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


class PrefetchPipelineSeams(PrefetchTrainPipelineSparseDist):  # type: ignore[misc]
    """A prefetching pipeline that can be interrupted, and that needs no CUDA streams.

    TorchRec's methods assume that every batch in flight is in the stage in which an
    undisturbed step leaves it. This class records the stage of each batch, and brings
    the batches to these stages before each step.
    """

    _pipelined_forward_type = _Forward
    _model_fwd: Callable[[Any], Any]
    _pipelined_modules: list[Any]
    _pipelined_postprocs: list[Any]

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, *args, **kwargs)
        self._context_type = BatchContext
        self._calls_model = self._model_fwd is model
        self._stepping = False
        self._loaded_for_training = model.training
        self._hook: RemovableHandle | None = None

    @property
    def in_step(self) -> bool:
        """Whether the pipeline is between the beginning and the end of a step."""
        return self._stepping

    def prefetch_without_stream(
        self,
        module: Any,
        features: Any,
        device: torch.device,
    ) -> None:
        """Prepares the rows of a module's next training batch if there is no stream."""
        raise NotImplementedError

    def finish_prefetch(self) -> None:
        """Waits until the rows of the batches in flight are prepared.

        Raises the error of the preparation.
        """
        raise NotImplementedError

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Trains the model on one batch, and returns the output of the model."""
        self._check_mode(dataloader_iter)
        try:
            self.finish_prefetch()
            if not self._model_attached:
                self.attach(self._model)
            return super().progress(dataloader_iter)
        except StopIteration:
            raise
        except BaseException:
            # The stages of the batches are not known now. The next step begins all of
            # them again.
            self._stepping = False
            self._begin_again()
            raise
        finally:
            self._stepping = False
            self._loaded_for_training = self._model.training

    def _check_mode(self, dataloader_iter: Iterator[Any]) -> None:
        is_same_iterator = dataloader_iter is self._dataloader_iter
        is_same_mode = self._model.training == self._loaded_for_training
        if not self.batches or is_same_iterator or is_same_mode:
            return
        loaded = "training" if self._loaded_for_training else "evaluation"
        mode = "training" if self._model.training else "evaluation"
        raise RuntimeError(
            f"progress: {len(self.batches)} batch(es) of another iterator were loaded"
            f" for {loaded}, and the model is in {mode} mode now: call the model itself"
            " to evaluate a batch between two steps, use another pipeline for the"
            " other iterator, or train the loaded batches first: call"
            " progress(iter(())) until it raises StopIteration"
        )

    def _create_context(self) -> BatchContext:
        context: BatchContext = super()._create_context()
        context.pipeline = weakref.ref(self)
        return context

    def fill_pipeline(self, dataloader_iter: Iterator[Any]) -> None:
        """Loads up to two batches, and brings them to their stages.

        The first is prefetched, and the input distribution of the second is started.
        """
        # TorchRec's method does nothing if a batch is in flight, in whatever stage
        # (torchrec 1.7.0 to 1.9.2). Then one batch without input distribution would be
        # left by a new iterator, an error, or a pipeline that was detached.
        if not self.batches and not self.enqueue_batch(dataloader_iter):
            return
        if not self.contexts[0].prefetched:
            self._start(0)
            self.wait_sparse_data_dist(self.contexts[0])
            self._prefetch(self.contexts[0])
            self.finish_prefetch()
        if len(self.batches) == 1 and not self.enqueue_batch(dataloader_iter):
            self._stepping = True
            return
        if not self.contexts[1].distributed:
            self._start_early()
        self._stepping = True

    def _start(self, place: int) -> None:
        """Starts the input distribution of a batch in flight, if it is not started."""
        if not self.contexts[place].distributed:
            # The method pipelines the model before its first batch.
            self._init_pipelined_modules(
                self.batches[place],
                self.contexts[place],
                self._pipelined_forward_type,
            )

    def _start_early(self) -> None:
        """Starts the input distribution of the second batch.

        On one rank, its error waits until it is the first.
        """
        try:
            self.start_sparse_data_dist(self.batches[1], self.contexts[1])
        except Exception:
            dist = torch.distributed
            has_other_ranks = dist.is_initialized() and dist.get_world_size() > 1
            if has_other_ranks:
                raise  # Ranks that go on would wait for one that has not started it.
            self._forget(1)

    def start_sparse_data_dist(self, batch: Any, context: BatchContext) -> None:
        """Starts the input distribution of a batch before a step.

        At the end of a step it does nothing, so that an error of the third batch does
        not look like an error of the step that has trained the first.
        """
        if not self._stepping:
            super().start_sparse_data_dist(batch, context)
            context.distributed = True

    def _prefetch(self, context: BatchContext) -> None:
        # The only place between the input distribution and the forward of a batch.
        if not context.distributed:
            return
        if self._prefetch_stream is not None:
            super()._prefetch(context)
        else:
            self._prefetch_on_host(context)
        context.prefetched = True

    def _prefetch_on_host(self, context: BatchContext) -> None:
        for module in self._pipelined_modules:
            name = module.forward.name
            features = context.input_dist_tensors_requests.pop(name).wait()
            module_context = context.module_contexts.pop(name)
            context.module_input_post_prefetch[name] = features
            context.module_contexts_post_prefetch[name] = module_context
            if self._model.training:
                self.prefetch_without_stream(module, features, self._device)

    def _begin_again(self) -> None:
        """Forgets what was begun for the batches in flight, and keeps the batches."""
        self._finish_prefetch_quietly()
        for place in range(len(self.contexts)):
            self._forget(place)
        for module in self._pipelined_modules:
            for child in module.modules():
                forget_begun_batches = getattr(child, "forget_begun_batches", None)
                if forget_begun_batches is not None:
                    forget_begun_batches()

    def _finish_prefetch_quietly(self) -> None:
        waiting = True
        while waiting:
            try:
                self.finish_prefetch()
                waiting = False
            except Exception:
                # The rows are prepared again before the batch is used, which raises
                # this error again.
                continue

    def _forget(self, place: int) -> None:
        context = self._create_context()
        context.index = self.contexts[place].index
        self._next_index -= 1
        self.contexts[place] = context

    def detach(self) -> nn.Module:
        """Gives the model its own forward back, and returns the model.

        The batches in flight are kept. The next :meth:`progress` attaches the model and
        begins these batches again, so that the model may be evaluated, trained, saved
        or resharded in the meantime.
        """
        if not self._model_attached:
            return self._model  # type: ignore[no-any-return]
        self._begin_again()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        model: nn.Module = super().detach()
        self._pipelined_modules = []
        self._pipelined_postprocs = []
        return model

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Takes up the model again after :meth:`detach`, or takes another model.

        :meth:`progress` calls it if needed.

        Args:
            model: The model. Default: None, the model that was detached.
            sparse_dist: Whether the input distribution of the first batch in flight is
                started at once. Default: True.
        """
        if self._model_attached:
            self.detach()
        if model is not None and self._calls_model:
            # TorchRec's method would go on calling the former model (torchrec 1.7.0 to
            # 1.9.2).
            self._model_fwd = model
        super().attach(model, sparse_dist)

    def reset(self) -> None:
        """Drops the batches in flight."""
        self._begin_again()
        super().reset()

    def _pipeline_model(
        self,
        batch: Any,
        context: BatchContext,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super()._pipeline_model(batch, context, *args, **kwargs)
        if self._hook is None:
            hook = _BeforeForward(weakref.ref(self))
            model = get_unwrapped_module(self._model)
            self._hook = model.register_forward_pre_hook(hook)

    def before_forward(self) -> None:
        """Detaches the model if it is called outside of a step of the pipeline."""
        # Modules that prepare the input of a sharded module are replaced too, and run
        # before it.
        if not self._stepping:
            self.detach()
