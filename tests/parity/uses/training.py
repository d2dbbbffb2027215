"""Uses of a training loop: gradients, modes, parameters and hooks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.checkpoint import models
from tests.parity.run_cell import CPU

from .use import Models, batch, common, loss_of, predictions, train, use, weight_key


class LossOfModel(nn.Module):
    """What a pipeline trains: it returns the loss and the predictions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any) -> tuple[torch.Tensor, torch.Tensor]:
        predicted: torch.Tensor = self.model(features)
        return predicted.square().sum(), predicted


@use
def clipped_gradients(new: Models) -> Any:
    """`clip_grad_norm_(model.parameters(), ...)`"""
    model, optimizer = new.with_optimizer()
    loss_of(model, 1).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return [norm, predictions(model)]


@use
def clipped_values(new: Models) -> Any:
    """`clip_grad_value_(model.parameters(), ...)`"""
    model, optimizer = new.with_optimizer()
    loss_of(model, 1).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    return predictions(model)


@use
def gradients_set_to_none(new: Models) -> Any:
    """`model.zero_grad()`, `optimizer.zero_grad(set_to_none=...)`"""
    model, optimizer = new.with_optimizer()
    for clear in (
        model.zero_grad,
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=True),
    ):
        loss_of(model, 1).backward()
        optimizer.step()
        clear()
    return [
        predictions(model),
        {name: parameter.grad is None for name, parameter in model.named_parameters()},
    ]


@use
def accumulated_gradients(new: Models) -> Any:
    """Several backward passes before one `optimizer.step()`"""
    model, optimizer = new.with_optimizer()
    for seed in range(4):
        (loss_of(model, seed) / 4).backward()
    optimizer.step()
    return predictions(model)


@use
def scaled_gradients(new: Models) -> Any:
    """`torch.amp.GradScaler`"""
    model, optimizer = new.with_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for seed in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, seed)).backward()
        scaler.step(optimizer)
        scaler.update()
    return predictions(model)


@use
def scaled_dense_gradients(new: Models) -> Any:
    """`torch.amp.GradScaler` with torch's own optimizer of the dense part"""
    model = new()
    optimizer = torch.optim.Adam(model.module.over.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for seed in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, seed)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return predictions(model)


@use
def automatic_precision(new: Models) -> Any:
    """`torch.autocast("cpu", torch.bfloat16)`"""
    model, optimizer = new.with_optimizer()
    for seed in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
    return predictions(model)


@use
def dense_gradients(new: Models) -> Any:
    """`torch.autograd.grad(loss, ...)` of a layer, which updates no row"""
    model = new()
    (gradient,) = torch.autograd.grad(loss_of(model, 1), [model.module.over.weight])
    return [gradient, predictions(model)]


@use
def gradients_of_rows(new: Models) -> Any:
    """`torch.autograd.grad(loss, model.parameters())`"""
    model = new()
    gradients = torch.autograd.grad(
        loss_of(model, 1), list(model.parameters()), allow_unused=True
    )
    return [gradients[-1], predictions(model)]


@use
def gradient_of_the_outputs(new: Models) -> Any:
    """`retain_grad()` and a hook of the looked-up rows"""
    model, seen = new(), []
    rows = model.module.sparse(batch(1)).values()
    rows.retain_grad()
    rows.register_hook(lambda gradient: seen.append(gradient.clone()))
    rows.square().sum().backward()
    order = [model.module.sparse(batch(1))[key] for key in ("u", "i", "j")]
    return [rows.grad.square().sum(), seen[0].square().sum(), torch.cat(order, 1)]


@use
def two_losses(new: Models) -> Any:
    """Two losses of one forward pass, `backward(retain_graph=True)` for the first"""
    model = new()
    out = model(batch(1))
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()
    return predictions(model)


@use
def second_derivative(new: Models) -> Any:
    """A gradient penalty: `torch.autograd.grad(..., create_graph=True)` of the dense
    part
    """
    model = new()
    (gradient,) = torch.autograd.grad(
        loss_of(model, 1), [model.module.over.weight], create_graph=True
    )
    gradient.square().sum().backward()
    return [model.module.over.weight.grad, predictions(model)]


@use
def recomputed_layer(new: Models) -> Any:
    """`torch.utils.checkpoint.checkpoint` of the dense part"""
    model = new()
    pooled = model.module.sparse(batch(1))
    features = torch.cat([pooled[key] for key in ("u", "i", "j")], dim=1)
    checkpoint(model.module.over, features, use_reentrant=False).sum().backward()
    return [model.module.over.weight.grad, predictions(model)]


@use
def recomputed_model(new: Models) -> Any:
    """`torch.utils.checkpoint.checkpoint` of the whole model"""
    model, optimizer = new.with_optimizer()
    for seed in range(3):
        optimizer.zero_grad()
        checkpoint(model, batch(seed), use_reentrant=False).square().sum().backward()
        optimizer.step()
    return predictions(model)


@use
def second_backward(new: Models) -> Any:
    """A second `backward()` without `retain_graph`, which is an error"""
    model = new()
    loss = loss_of(model, 1)
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        return "second time" in str(error)
    return "no error"


@use
def backward_of_chosen_inputs(new: Models) -> Any:
    """`loss.backward(inputs=[...])` of a layer, which updates no row"""
    model = new()
    loss_of(model, 1).backward(inputs=[model.module.over.weight])
    return [model.module.over.weight.grad, predictions(model)]


@use
def forward_without_backward(new: Models) -> Any:
    """Forward passes in training mode whose results are dropped"""
    model = new()
    for seed in range(3):
        model(batch(seed))
    train(model)
    return predictions(model)


@use
def train_pipeline(new: Models) -> Any:
    """TorchRec's `TrainPipelineSparseDist`"""
    model, optimizer = new.with_optimizer()
    pipeline = TrainPipelineSparseDist(LossOfModel(model), optimizer, CPU)
    batches = iter([batch(seed) for seed in range(5)])
    losses = [pipeline.progress(batches)[0] for _ in range(5)]
    return [losses, predictions(model)]


@use
def lookups_without_gradient(new: Models) -> Any:
    """Lookups under `torch.no_grad()`, in training mode"""
    model = new()
    with torch.no_grad():
        found = model(batch(1))
    train(model)
    return [found, predictions(model)]


@use
def lookups_for_inference(new: Models) -> Any:
    """Lookups under `torch.inference_mode()`"""
    model = new()
    with torch.inference_mode():
        return model(batch(1)).clone()


@use
def evaluation_between_steps(new: Models) -> Any:
    """`model.eval()` and `model.train()` between steps"""
    model, optimizer, seen = *new.with_optimizer(), []
    for step in range(3):
        train(model, optimizer, steps=1, first=step)
        model.eval()
        with torch.no_grad():
            seen.append(model(batch(50)))
        model.train()
    return [seen, model.training, model.module.sparse.training]


@use(
    differs=(
        "in evaluation mode, a backward pass changes no row of a RecStore table, and"
        " warns: call `train()`"
    )
)
def backward_in_evaluation(new: Models) -> Any:
    """A backward pass in evaluation mode"""
    model = new()
    model.eval()
    loss_of(model, 1).backward()
    return predictions(model)


@use
def frozen_table(new: Models) -> Any:
    """`requires_grad_(False)` of a table's parameter after sharding"""
    model = new()
    dict(model.named_parameters())[weight_key("user")].requires_grad_(False)
    train(model)
    return predictions(model)


@use
def frozen_model(new: Models) -> Any:
    """`model.requires_grad_(False)` after sharding"""
    model = new()
    model.requires_grad_(False)
    return predictions(model)


@use(
    differs=(
        "a RecStore table whose parameter requires no gradient when it is sharded is"
        " frozen, and not trained"
    )
)
def frozen_before_sharding(new: Models) -> Any:
    """`requires_grad_(False)` of the tables before sharding"""
    model = new(prepare=lambda whole: whole.sparse.requires_grad_(False))
    before = predictions(model)
    train(model)
    return [before, predictions(model)]


@use
def frozen_dense_part(new: Models) -> Any:
    """`requires_grad_(False)` of a layer beside the tables"""
    model = new()
    model.module.over.requires_grad_(False)
    train(model)
    return [model.module.over.weight, predictions(model)]


@use
def names_of_parameters(new: Models) -> Any:
    """The names, dtypes, devices and `requires_grad` and columns of
    `named_parameters()`
    """
    return {
        name: [str(p.dtype), str(p.device), p.requires_grad, p.dim(), p.shape[-1]]
        for name, p in new().named_parameters()
    }


@use(
    differs=(
        "a parameter of a RecStore table has no rows, because training makes them: call"
        " `table_stats`"
    )
)
def number_of_weights(new: Models) -> Any:
    """`sum(p.numel() for p in model.parameters())`"""
    return sum(parameter.numel() for parameter in new().parameters())


@use
def read_row(new: Models) -> Any:
    """A row read from a parameter:
    `model.module.sparse.embedding_bags["user"].weight[3]`
    """
    return new().module.sparse.embedding_bags["user"].weight[3]


@use
def histogram_of_weights(new: Models) -> Any:
    """TensorBoard's `add_histogram` of all `named_parameters()`"""
    writer, model = SummaryWriter(str(new.folder)), new()
    for name, parameter in model.named_parameters():
        writer.add_histogram(name, parameter, 0)
    writer.close()
    return (
        sorted(each.suffix for each in new.folder.iterdir() if "tfevents" in each.name)
        != []
    )


@use
def printed_model(new: Models) -> Any:
    """`print(model)`, and `repr` of its fused optimizer and of its parameters"""
    model = new()
    return all(map(repr, (model, model.fused_optimizer, *model.parameters())))


@use
def parameter_by_name(new: Models) -> Any:
    """`model.module.get_parameter(...)` and `get_submodule(...)`"""
    model = new().module
    submodule = model.get_submodule("sparse.embedding_bags")
    return [model.get_parameter(weight_key("user")).shape[1], type(submodule).__name__]


@use
def written_row(new: Models) -> Any:
    """A row written to a parameter: `weight[3] = 0`, under `torch.no_grad()`"""
    model = new()
    with torch.no_grad():
        model.module.sparse.embedding_bags["user"].weight[3] = 0
    return predictions(model)


@use
def penalty_of_weights(new: Models) -> Any:
    """A penalty of a table's weights in the loss: `weight.square().sum()`"""
    model = new()
    penalty = model.module.sparse.embedding_bags["user"].weight.square().sum()
    (loss_of(model, 1) + penalty).backward()
    return [penalty, predictions(model)]


@use
def buffers_and_modules(new: Models) -> Any:
    """`named_buffers()` and the types of `modules()` beside the tables"""
    model = new()
    kinds = Counter(
        type(module).__name__
        for module in model.modules()
        if "Collection" not in type(module).__name__
    )
    return [sorted(name for name, _ in model.named_buffers()), kinds]


@use
def initialized_layers(new: Models) -> Any:
    """`model.apply(...)` that initializes the linear layers"""
    model = new()
    model.apply(
        lambda module: (
            nn.init.constant_(module.weight, 0.5)
            if isinstance(module, nn.Linear)
            else None
        )
    )
    return predictions(model)


@use
def initialized_parameters(new: Models) -> Any:
    """`nn.init.constant_` of all `parameters()`"""
    model = new()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    return predictions(model)


@use
def hooks_of_modules(new: Models) -> Any:
    """Forward and backward hooks of the model and of the sharded collection"""
    model, seen = new(), []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, out: seen.append("after"))
    model.module.sparse.register_forward_hook(
        lambda module, args, out: seen.append("tables")
    )
    model.module.over.register_full_backward_hook(
        lambda module, into, out: seen.append("backward")
    )
    train(model, steps=1)
    return [seen, predictions(model)]


@use
def moved_to_the_cpu(new: Models) -> Any:
    """`model.to("cpu")` and `model.cpu()`"""
    model, optimizer = new.with_optimizer()
    model.to("cpu")
    model.cpu()
    train(model, optimizer)
    return predictions(model)


@use
def doubled_precision(new: Models) -> Any:
    """`model.module.over.double()`, a layer beside the tables"""
    model = new()
    model.module.over.double()
    pooled = model.module.sparse(batch(1))
    model.module.over(
        torch.cat([pooled[k] for k in ("u", "i", "j")], 1).double()
    ).sum().backward()
    return [
        str(model.module.over.weight.grad.dtype),
        model.module.over.float()(torch.ones(1, 3 * models.DIM)),
    ]


@use
def half_precision(new: Models) -> Any:
    """`model.half()`, `model.bfloat16()`, `model.double()`: the dtypes of the rows"""
    found = []
    for cast in ("half", "bfloat16", "double"):
        model = getattr(new(), cast)()
        rows = model.module.sparse(batch(1)).values()
        state = model.state_dict()
        found.append(
            [
                str(rows.dtype),
                str(state[weight_key("user")].dtype),
                str(state["over.weight"].dtype),
            ]
        )
    return found


@use
def shared_memory(new: Models) -> Any:
    """`model.share_memory()`"""
    return predictions(new().share_memory())


@use
def keys_before_and_after(new: Models) -> Any:
    """`model.state_dict()` has the same keys before and after training"""
    model = new()
    before = common(model.state_dict())
    train(model)
    return [before, common(model.state_dict())]
