"""One play of a loop with one form of update: what the loop is given, and what is recorded of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap.hooks.engine import executors

if TYPE_CHECKING:
    from .corpus import Loop
    from .forms import Form

_BUCKET_CAP_MB = 1024 / 2**20
_SMALL_BYTES = 2**20

Record = dict[str, Any]
"""What there was at one yield, or at the end."""


class NotOffered(Exception):
    """A form has no way to do what the loop does."""


class Stepless(Optimizer):
    """A plain optimizer in a loop that leaves the call of ``step()`` out, as the automatic form asks.

    Everything else is the optimizer's own. (The loops of the corpus are written once, and call ``step()``.)
    """

    def __init__(self, optimizer: Optimizer, stage: Any = None) -> None:
        object.__setattr__(self, "bare", optimizer)
        object.__setattr__(self, "stage", stage)

    def skip_update(self) -> AbstractContextManager[Any]:
        """The stage's, where the loop has one."""
        if self.stage is None:
            raise NotOffered("a hook has no skip_update()")
        return self.stage.skip_update()

    def step(self, closure: Any = None) -> Any:
        """What a loop without the call does: run the closure."""
        return None if closure is None else closure()

    def __getattribute__(self, name: str) -> Any:
        if name in ("bare", "stage", "step", "skip_update", "__class__", "__dict__", "_opt_called"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "bare"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("step", "_opt_called"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.bare, name, value)


class Run:
    """What a loop is given besides its model and optimizer."""

    def __init__(self, loop: Loop, form: Form) -> None:
        self.loop, self.form = loop, form
        self.is_plain = form.name == "plain"
        self.rank = dist.get_rank()
        self._registered: list[Any] = []
        self._models: list[DistributedDataParallel] = []
        self._optimizers: list[Any] = []
        self.place = 0
        """How many batches have been used."""
        self._compares_state = True
        self.by_count: Any = None
        """The chain's ``DivideByCount``, where it has one."""

    def count(self, number: int) -> None:
        """Say how many samples the next loss is the sum of."""
        if self.by_count is not None:
            self.by_count.count(number)

    def weight(self, total: int) -> float:
        """What a sum is multiplied by where ``total`` samples of all ranks are counted; plain DDP divides by itself."""
        return dist.get_world_size() / total if self.by_count is None else 1.0

    def batches(self, steps: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's next inputs and targets."""
        for _ in range(self.loop.steps if steps is None else steps):
            yield self.loop.inputs(torch.Generator().manual_seed(1000 * self.place + self.rank))
            self.place += 1

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """A DDP model with several buckets."""
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # Of newer names of some options.
            ddp = DistributedDataParallel(model, **{"bucket_cap_mb": _BUCKET_CAP_MB, **self.loop.ddp, **self.form.ddp})
        self._models.append(ddp)
        return ddp

    def optimizer(self, ddp: DistributedDataParallel, params: Any = None) -> Any:
        """An optimizer for ``ddp`` in this run's form, as the loop holds it."""
        made = self.form.build(self, ddp, self.loop.groups(ddp) if params is None else params)
        self._optimizers.append(made)
        return made if self.loop.outer is None else self.loop.outer(made)

    def plain_optimizer(self, params: Any) -> Any:
        """The plain optimizer of the loop, as the user makes it."""
        cls, options = self.optimizer_class()
        return self.prepared(cls(params, **options))

    def optimizer_class(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """The class of the loop's optimizer, and its options."""
        return self.loop.optimizer.func, copy.deepcopy(self.loop.optimizer.keywords)  # A rate may be a tensor.

    def prepared(self, optimizer: Any) -> Any:
        return optimizer if self.loop.prepare is None else self.loop.prepare(optimizer)

    def keep(self, registration: Any) -> None:
        """Have :meth:`release` remove what was registered."""
        self._registered.append(registration)

    def release(self) -> None:
        """Leave all models to plain DDP, and forget the optimizers made so far."""
        if self.form.name == "hook":
            raise NotOffered("DDP does not take a hook out again")
        self._forget()

    def _forget(self) -> None:
        for registration in self._registered:
            registration.remove()
        self._registered.clear()
        self._optimizers.clear()

    def rewrap(self, ddp: DistributedDataParallel) -> DistributedDataParallel:
        """A new DDP model of the same module, with nothing registered."""
        self._forget()
        self._models.remove(ddp)
        return self.wrap(ddp.module)

    def settle(self, optimizer: Any) -> None:
        """Wait for parameters that are still on their way, as the docs ask of whoever reads them outside a forward."""
        if not self.form.is_settled:
            optimizer.wait()

    def compare_models_only(self) -> None:
        """From here on this rank's optimizers may be in another state than plain ones."""
        self._compares_state = False

    def state_of(self, optimizer: Any) -> Any:
        """The optimizer's whole state, which a plain optimizer can load."""
        return copy.deepcopy(self.form.state(optimizer))

    def load(self, optimizer: Any, state: Any) -> None:
        """Load a plain optimizer's state; local SGD warns that it has no count of steps."""
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            optimizer.load_state_dict(copy.deepcopy(state))

    def bare(self, optimizer: Any) -> Any:
        """What another library that calls ``step()`` is given: in the automatic forms the plain optimizer itself."""
        return optimizer.bare if isinstance(optimizer, Stepless) else optimizer

    def skip(self, optimizer: Any) -> AbstractContextManager[Any]:
        """Around a backward that is not this optimizer's."""
        return nullcontext() if self.is_plain or self.form.name == "local" else optimizer.skip_update()

    # What the player uses.

    def snapshot(self, yielded: Any, *, is_last: bool = False) -> Record:
        """What there is to compare; parameters that may still be on their way are read at the end alone."""
        record: Record = {} if is_last else {"yielded": (yielded, len(self._models))}
        if is_last or self.form.is_settled:
            modules = [ddp.module.state_dict() for ddp in self._models]
            names = [{name for name, _ in ddp.module.named_parameters()} for ddp in self._models]
            for kind in ("parameters", "buffers"):
                record[kind] = [
                    {name: value for name, value in state.items() if (name in own) == (kind == "parameters")}
                    for state, own in zip(modules, names, strict=True)
                ]
        if is_last or self.form.has_whole_state:
            states = [self.form.state(optimizer) for optimizer in self._optimizers]  # On every rank: it may gather.
            if self._compares_state and None not in states:
                record["optimizers"] = states
        return _cloned(record)


def play(loop: Loop, form: Form) -> list[Record]:
    """Plays ``loop`` with ``form`` from fixed seeds, and returns what there was at every yield and at the end."""
    torch.manual_seed(0)
    run = Run(loop, form)
    with mock.patch.object(executors, "SMALL_BYTES", _SMALL_BYTES) if form.is_inline else nullcontext():
        ddp = run.wrap(loop.model())
        optimizer = run.optimizer(ddp)
        torch.manual_seed(1)
        records = [run.snapshot(yielded) for yielded in loop.body(ddp, optimizer, run)]
        return [*records, run.snapshot(None, is_last=True)]


def _cloned(value: Any) -> Any:
    """The same with clones of all tensors, in plain containers."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):  # Asking for a Mapping takes longer than the clone.
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cloned(item) for item in value]
    return value
