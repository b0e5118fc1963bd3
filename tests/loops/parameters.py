"""Which parameters there are, and who updates them."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from .corpus import limit, loop, refused, variant
from .declared import HOOK_IS_NOT_TOLD
from .forms import AUTOMATIC, STAGED
from .models import ADAMW, decay_groups, mlp
from .plain import applied, touched, trained, usual, zero_grad_of_model
from .run import Run


def _per_layer(ddp: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [parameter], "lr": 0.01 * 2**place} for place, parameter in enumerate(ddp.parameters())]


def _layer_decay(ddp: nn.Module) -> list[dict[str, Any]]:
    parameters = list(ddp.parameters())
    return [
        {
            "params": [parameter],
            "lr_scale": 0.8 ** (len(parameters) - place),
            "weight_decay": 0.1 * (parameter.ndim > 1),
        }
        for place, parameter in enumerate(parameters)
    ]


def _by_factory(ddp: nn.Module) -> list[dict[str, Any]]:
    """As ``configure_optimizers`` of minGPT builds them: by kind of parameter, and in each group sorted by name."""
    named = dict(ddp.named_parameters())
    decayed = sorted(name for name in named if name.endswith("weight"))
    return [
        {"params": [named[name] for name in decayed], "weight_decay": 0.1},
        {"params": [named[name] for name in sorted(named.keys() - set(decayed), reverse=True)], "weight_decay": 0.0},
    ]


def _named(ddp: nn.Module) -> Any:
    return list(ddp.named_parameters())


def _some(ddp: nn.Module) -> list[nn.Parameter]:
    return list(ddp.parameters())[:2]


def _with_ignored() -> nn.Module:
    model = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    return model


IN_NO_BUCKET = "{} parameters of the SGD have gradients but are in no bucket of the model"
OUTSIDE = [
    *refused(["hook"], IN_NO_BUCKET.format(1)),
    *refused(["automatic"], "1 parameters of the SGD are not in this model"),
    *refused(STAGED, "1 of 7 parameters of the ZeroRedundancyOptimizer are not trained by this model"),
]
IGNORED = [
    *refused(["hook"], IN_NO_BUCKET.format(2)),
    *refused(["automatic"], "2 parameters of the SGD are not in this model"),
    *refused(STAGED, "2 of 6 parameters of the ZeroRedundancyOptimizer are not trained by this model"),
]
SECOND_MODEL = [
    *refused(AUTOMATIC, IN_NO_BUCKET.format(6)),
    *refused(STAGED, "1 of 1 parameters of the ZeroRedundancyOptimizer are not trained by this model"),
]

variant(usual, "groups: no decay for biases", groups=decay_groups)
variant(usual, "a group per parameter, layer-wise rates", groups=_per_layer, optimizer=ADAMW)
variant(usual, "named_parameters()", groups=_named)
variant(usual, "groups of a factory, sorted by name", groups=_by_factory, optimizer=ADAMW)


def _decay_by_layer(run: Run, ddp: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (run.place + 1) * group["lr_scale"]


variant(
    touched(before_forward=_decay_by_layer),
    "layer-wise decay: lr_scale in the groups, the rate set in each step",
    groups=_layer_decay,
    optimizer=ADAMW,
)

TEMPERATURE = nn.Parameter(torch.ones(1))


def _with_temperature(ddp: nn.Module) -> list[nn.Parameter]:
    TEMPERATURE.data.fill_(1.0)
    TEMPERATURE.grad = None
    return [*ddp.parameters(), TEMPERATURE]


@loop("a parameter outside the model, such as a learned temperature", OUTSIDE, groups=_with_temperature)
def outside(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x) * TEMPERATURE, y)
        loss.backward()
        dist.all_reduce(TEMPERATURE.grad)
        TEMPERATURE.grad.div_(dist.get_world_size())
        optimizer.step()
        yield loss, TEMPERATURE


@loop("a second plain optimizer for the last layer", groups=lambda ddp: list(ddp.parameters())[:4])
def second_optimizer(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    other = optim.Adam(list(ddp.parameters())[4:], lr=0.01)
    for x, y in run.batches():
        optimizer.zero_grad()
        other.zero_grad()
        loss = applied(optimizer, mse_loss(ddp(x), y))
        other.step()
        yield loss


variant(zero_grad_of_model, "an optimizer of a part of the model, the rest not trained", groups=_some)


@loop("parameters that DDP ignores", IGNORED, model=_with_ignored)
def ignored(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        for parameter in ddp.module[0].parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        optimizer.step()
        yield loss


@loop("add_param_group in mid-run", groups=lambda ddp: list(ddp.parameters())[4:], steps=4)
def added(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        if place == 2:
            optimizer.add_param_group({"params": list(ddp.parameters())[:4], "lr": 0.05})
        ddp.zero_grad()
        loss = applied(optimizer, mse_loss(ddp(x), y))
        yield loss


def _freeze(run: Run, ddp: Any, optimizer: Any) -> None:
    if run.place == 2:
        ddp.module[0].requires_grad_(False)


variant(
    touched(before_forward=_freeze),
    "layers frozen late",
    HOOK_IS_NOT_TOLD,
    ddp={"find_unused_parameters": True},
    optimizer=ADAMW,
    steps=4,
)


@loop("layers unfrozen late, with a new DDP model and optimizer", steps=4)
def unfrozen_late(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        if place == 0:
            ddp.module[0].requires_grad_(False)
            ddp = run.rewrap(ddp)
            optimizer = run.optimizer(ddp, [p for p in ddp.parameters() if p.requires_grad])
        if place == 2:
            ddp.module[0].requires_grad_(True)
            ddp = run.rewrap(ddp)
            optimizer = run.optimizer(ddp)
        loss = trained(ddp, optimizer, x, y)
        yield loss


@loop("the optimizer made anew in mid-run", limit(["hook"], "DDP does not take a hook out again"), steps=4)
def made_anew(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        if place == 2:
            run.release()
            optimizer = run.optimizer(ddp)
        loss = trained(ddp, optimizer, x, y)
        yield loss


@loop("one optimizer for two DDP models", SECOND_MODEL)
def two_models(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    other = run.wrap(mlp())
    for parameter in other.parameters():
        optimizer.add_param_group({"params": [parameter]})
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = applied(optimizer, mse_loss(ddp(x) + other(x), y))
        yield loss
