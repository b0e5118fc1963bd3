"""Dtypes, autocast and loss scaling."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from .corpus import loop, refused, variant
from .declared import EDITED, SCALED
from .forms import AUTOMATIC, INTERLEAVED, SHARDED
from .models import ADAMW, features, mlp
from .plain import usual
from .run import Run


def _in(dtype: torch.dtype) -> dict[str, Any]:
    def inputs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = features(generator)
        return x.to(dtype), y.to(dtype)

    return {"model": lambda: mlp().to(dtype), "inputs": inputs}


class Mixed(nn.Module):
    """Layers in float32, float64 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.in_single, self.in_double = nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.float64)
        self.in_half = nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.in_single(x) + self.in_double(x.double()).float() + self.in_half(x.bfloat16()).float()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(16, 16, dtype=torch.complex64) for _ in range(2))
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x.to(torch.complex64))).abs())


variant(usual, "a bfloat16 model, SGD", **_in(torch.bfloat16))
variant(usual, "a float64 model, AdamW", optimizer=ADAMW, **_in(torch.float64))
variant(usual, "layers of three dtypes", model=Mixed, optimizer=partial(optim.AdamW, lr=0.01))
# Of None Adafactor makes the eps of the first parameter's dtype, for all of a group.
variant(
    usual,
    "layers of three dtypes, Adafactor",
    refused([*INTERLEAVED, *AUTOMATIC, *SHARDED], "updating in parts would not equal one step of Adafactor: "),
    model=Mixed,
    optimizer=partial(optim.Adafactor, lr=0.01),
)
variant(
    usual,
    "layers of three dtypes, Adafactor with eps",
    model=Mixed,
    optimizer=partial(optim.Adafactor, lr=0.01, eps=(1e-7, 1e-3)),
)
variant(usual, "complex parameters", model=Complex)


@loop("autocast to bfloat16")
def autocast(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def scaled(*, clips: bool) -> Any:
    """The usual loop with a GradScaler, and one batch whose loss overflows."""

    def body(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for place, (x, y) in enumerate(run.batches()):
            optimizer.zero_grad()
            loss = mse_loss(ddp(x), y)
            if place == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(run.bare(optimizer))
                clip_grad_norm_(ddp.parameters(), 0.1)
            scaler.step(run.bare(optimizer))
            scaler.update()
            yield loss, scaler.get_scale()

    return body


variant(scaled(clips=False), "GradScaler that skips a step", SCALED, steps=3)
variant(
    scaled(clips=True),
    "GradScaler with unscale_, a clip and a skipped step",
    SCALED,
    refused(["zero deferred"], "the gradient of "),
    steps=3,
)


@loop("loss scaling by hand", EDITED)
def scaled_by_hand(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        (loss * 1024).backward()
        for parameter in ddp.parameters():
            parameter.grad.div_(1024)
        optimizer.step()
        yield loss


@loop("a GradScaler that is off")
def scaler_off(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield loss, scaler.get_scale()
