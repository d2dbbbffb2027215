"""Uses of Lightning and of Accelerate."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import DataLoader

from .use import Models, batch, check_equal, predictions, use


def lightning_class() -> Any:
    import lightning

    class Training(lightning.LightningModule):
        def __init__(self, new: Models, seed: int = 0) -> None:
            super().__init__()
            self.model = new(seed)

        def training_step(self, number: torch.Tensor, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch(int(number))).square().sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.model.module.over.parameters(), lr=0.01)

    return Training


def lightning_module(new: Models, seed: int = 0) -> Any:
    return lightning_class()(new, seed)


def fitted(
    new: Models,
    module: Any,
    epochs: int,
    resume: Any = None,
    weights_only: bool | None = None,
    **more: Any,
) -> Any:
    import lightning

    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=new.folder,
        **{"enable_checkpointing": False, "enable_model_summary": False, **more},
    )
    trainer.fit(
        module,
        DataLoader(range(3), batch_size=1),
        ckpt_path=resume,
        weights_only=weights_only,
    )
    return trainer


@use(needs="lightning")
def lightning_fit(new: Models) -> Any:
    """Lightning's `Trainer.fit`"""
    module = lightning_module(new)
    fitted(new, module, epochs=2, enable_model_summary=True)
    return predictions(module.model)


@use(needs="lightning")
def lightning_resume(new: Models) -> Any:
    """Lightning's `Trainer.save_checkpoint`, and `Trainer.fit(..., ckpt_path=...)`"""
    module, path = lightning_module(new), new.folder / "last.ckpt"
    fitted(new, module, epochs=1).save_checkpoint(path)
    other = lightning_module(new, seed=1)
    fitted(new, other, epochs=2, resume=path)
    return predictions(other.model)


@use(needs="lightning")
def lightning_resume_trusted(new: Models) -> Any:
    """Lightning's `Trainer.fit(..., ckpt_path=..., weights_only=False)`"""
    module, path = lightning_module(new), new.folder / "last.ckpt"
    fitted(new, module, epochs=1).save_checkpoint(path)
    other = lightning_module(new, seed=1)
    fitted(new, other, epochs=2, resume=path, weights_only=False)
    return predictions(other.model)


@use(needs="lightning")
def lightning_resume_of_the_inside(new: Models) -> Any:
    """Lightning's `Trainer.fit(..., ckpt_path=...)` of a module whose `load_state_dict`
    loads the model inside of it
    """

    class Training(lightning_class()):
        def load_state_dict(
            self, state: dict[str, Any], strict: bool = True, assign: bool = False
        ) -> Any:
            return self.model.load_state_dict(
                {key.removeprefix("model."): state[key] for key in state}, strict=strict
            )

    module, path = Training(new), new.folder / "last.ckpt"
    fitted(new, module, epochs=1).save_checkpoint(path)
    other = Training(new, seed=1)
    fitted(new, other, epochs=1, resume=path)
    check_equal(predictions(other.model), predictions(module.model))
    fitted(new, other, epochs=2, resume=path, weights_only=True)
    return predictions(other.model)


@use(needs="lightning")
def lightning_checkpoints(new: Models) -> Any:
    """Lightning's `ModelCheckpoint` of each epoch, whose `"state_dict"` is loaded into
    a model
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    module, keeper = lightning_module(new), ModelCheckpoint(new.folder, save_last=True)
    fitted(new, module, epochs=2, enable_checkpointing=True, callbacks=[keeper])
    other, state = (
        new(1),
        torch.load(keeper.last_model_path, weights_only=False)["state_dict"],
    )
    other.load_state_dict(
        {key.removeprefix("model."): value for key, value in state.items()}
    )
    check_equal(predictions(other), predictions(module.model))
    return predictions(other)


@use(needs="lightning")
def lightning_state(new: Models) -> Any:
    """`load_state_dict` of the `state_dict` of another `LightningModule`"""
    module, other = lightning_module(new), lightning_module(new, seed=1)
    module.load_state_dict(other.state_dict())
    return predictions(module.model)


@use(needs="lightning")
def lightning_validation(new: Models) -> Any:
    """Lightning's `Trainer.validate`, gradient clipping and gradient accumulation"""

    class Training(lightning_class()):
        def validation_step(self, number: torch.Tensor, index: int) -> None:
            self.log(
                "loss", self.model(batch(int(number))).square().sum(), batch_size=4
            )

    module = Training(new)
    trainer = fitted(
        new, module, epochs=1, gradient_clip_val=0.1, accumulate_grad_batches=2
    )
    return trainer.validate(module, DataLoader(range(3), batch_size=1), verbose=False)


def accelerated(new: Models, seed: int = 0) -> Any:
    """An Accelerator, and a model and its dense optimizer that it has prepared and
    trained.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # With it, Accelerate puts the model into DistributedDataParallel.
    launcher = os.environ.pop("LOCAL_RANK")
    accelerator, model = Accelerator(cpu=True), new(seed)
    os.environ["LOCAL_RANK"] = launcher
    optimizer = torch.optim.Adam(model.module.over.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(range(3), batch_size=1)
    )
    for number in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch(int(number))).square().sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return accelerator, model


@use(needs="accelerate")
def accelerate_train(new: Models) -> Any:
    """Accelerate's `prepare`, `backward` and `clip_grad_norm_`"""
    return predictions(accelerated(new)[1])


@use(needs="accelerate")
def accelerate_state(new: Models) -> Any:
    """Accelerate's `save_state` and `load_state`"""
    accelerator, model = accelerated(new)
    accelerator.save_state(new.folder / "1")
    expected = predictions(model)
    accelerator, model = accelerated(new, seed=1)
    accelerator.load_state(new.folder / "1")
    check_equal(predictions(model), expected)


@use(needs="accelerate")
def accelerate_state_pickled(new: Models) -> Any:
    """Accelerate's `save_state(..., safe_serialization=False)` and `load_state`"""
    accelerator, model = accelerated(new)
    accelerator.save_state(new.folder / "1", safe_serialization=False)
    expected = predictions(model)
    accelerator, model = accelerated(new, seed=1)
    accelerator.load_state(new.folder / "1")
    check_equal(predictions(model), expected)


@use(needs="accelerate")
def accelerate_model(new: Models) -> Any:
    """Accelerate's `save_model`"""
    accelerator, model = accelerated(new)
    accelerator.save_model(model, new.folder / "1")


@use(needs="accelerate")
def accelerate_get_state(new: Models) -> Any:
    """Accelerate's `get_state_dict` and `unwrap_model`, and `load_state_dict`"""
    accelerator, model = accelerated(new)
    other = new(1)
    other.load_state_dict(accelerator.get_state_dict(model))
    check_equal(predictions(other), predictions(accelerator.unwrap_model(model)))
    return predictions(other)
