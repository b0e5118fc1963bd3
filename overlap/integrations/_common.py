"""Shared by the integrations: a chain on the model and the optimizers that a framework has made, and its files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._checks import check_ddp, type_name
from overlap.errors import ConfigurationError
from overlap.hooks import Chain, Registration, Stage, chain
from overlap.hooks.stage import walk
from overlap.optim import LocalSGD, OverlappedOptimizer, ZeroRedundancyOptimizer
from overlap.optim.optimizer import OptimizerProxy
from overlap.optim.update import Update
from overlap.resume import TrainState
from overlap.resume.train_state import remembers

ChainFor = Stage | Sequence[Stage] | Callable[..., Stage]
LocalSGDFor = Callable[[DistributedDataParallel, Any], LocalSGD]

_logger = logging.getLogger("overlap.integrations")


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Wraps the imports of the package that ``extra`` of the distribution installs and is named after.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != extra:
            raise  # It is there, and something that it needs is not.
        error.msg = f"{error.msg}: pip install '.[{extra}]' in a clone of overlap"
        raise


@dataclass(frozen=True)
class Recipe:
    """The arguments of a user, before there is a model.

    ``chain`` is a stage that reduces and makes no update, a list of stages, or a function of the optimizers that
    returns either: it is called with an ``OverlappedOptimizer`` of each (a ``ZeroRedundancyOptimizer`` as it is).
    ``local_sgd`` is a function of the model in DDP and its optimizer that returns a ``LocalSGD``.
    """

    chain: ChainFor | None = None
    local_sgd: LocalSGDFor | None = None

    def __post_init__(self) -> None:
        if self.chain is not None and self.local_sgd is not None:
            raise ConfigurationError("chain and local_sgd were both given: LocalSGD takes its reducer and its update")
        if isinstance(self.chain, (list, tuple)):
            object.__setattr__(self, "chain", chain(*self.chain))
        for name, given in (("chain", self.chain), ("local_sgd", self.local_sgd)):
            if given is not None and (isinstance(given, type) or not callable(given)):
                raise ConfigurationError(
                    f"{name} is a function that is called when the model is in DDP, such as {_EXAMPLES[name]}, "
                    f"got {type_name(given)}"
                )


_EXAMPLES = {
    "chain": "lambda optimizer: chain(AllReduce(), Step(optimizer)), or a stage that makes no update",
    "local_sgd": "functools.partial(LocalSGD, period=8, start_step=1000)",
}


class Attachment:
    """A recipe carried out: registered with ``model`` until :meth:`remove`.

    Args:
        recipe: the chain or local SGD to register.
        model: in DDP.
        optimizers: the framework's, without wrappers.
        late: the use that the framework makes of gradients after backward, such as ``max_grad_norm=1.0 clips after
            backward``; interleaved updates of the chain are then deferred. Empty: nothing.
        instead: the alternative where an update cannot be deferred, for the message.

    Raises:
        ConfigurationError: the recipe returned something else, or does not fit; and as registering does.
    """

    def __init__(
        self, recipe: Recipe, model: Any, optimizers: Sequence[Optimizer], *, late: str = "", instead: str = ""
    ) -> None:
        self.ddp = check_ddp(model)
        self.given = list(optimizers)
        self.optimizers: list[Any] = self.given
        """Those that the training loop is to step, in the place of those given."""
        self.updates: list[Update[Any]] = []
        """Those of the chain."""
        self.registration: Registration | None = None
        self.is_local = recipe.local_sgd is not None
        """Whether ranks have models of their own, between two averages."""
        if recipe.local_sgd is not None:
            if len(self.given) != 1:
                raise ConfigurationError(f"local_sgd takes one optimizer, and there are {len(self.given)}")
            local = recipe.local_sgd(self.ddp, self.given[0])
            if not isinstance(local, LocalSGD):
                raise ConfigurationError(f"local_sgd returned {type_name(local)}, and not a LocalSGD")
            self.optimizers, self.registration = [local], local.registration
        elif recipe.chain is not None:
            self.registration = self._chain(recipe.chain, late, instead).register(self.ddp)
        self.sharded = [one for one in self.optimizers if isinstance(one, ZeroRedundancyOptimizer)]
        """The optimizers whose state is divided among the ranks."""
        # State that all ranks have alike is in the framework's own checkpoint; ranks of local SGD have little alike.
        self.state = TrainState(self.ddp, self.optimizers, stages_only=not self.is_local)
        """The state that the framework's own checkpoint lacks."""

    def _chain(self, given: Any, late: str, instead: str) -> Chain:
        made: Any = given
        overlapped = self.given
        if not isinstance(made, Stage):
            overlapped = [_overlapped(one) for one in self.given]
            made = made(*overlapped)
            made = chain(*made) if isinstance(made, (list, tuple)) else made
            if not isinstance(made, Stage):
                raise ConfigurationError(
                    f"chain is a function of the optimizer that returns a stage, such as {_EXAMPLES['chain']}; it "
                    f"returned {type_name(made)}"
                )
        self.updates = [stage for stage in walk(made) if isinstance(stage, Update)]
        if self.updates:
            self.optimizers = overlapped
        for update in self.updates if late else ():
            if update.updates_after_backward:
                continue
            update.defer()
            if not update.updates_after_backward:
                raise ConfigurationError(
                    f"{late}, but {update!r} has made the update in backward by then: use "
                    f"{update.form.deferred_code}{instead}"
                )
            _logger.info("%s: the update of the chain is %r", late, update)
        return chain(made)

    @property
    def has_updates(self) -> bool:
        """Whether something registered makes the updates, and not the framework."""
        return self.is_local or bool(self.updates)

    @property
    def updates_in_backward(self) -> bool:
        """Whether an update of the chain is made in backward, so that its gradients are read-only after it."""
        return not all(update.updates_after_backward for update in self.updates)

    def consolidate(self) -> None:
        """Gather divided states on rank 0, whose ``state_dict()`` a framework saves; every rank calls it."""
        for zero in self.sharded:
            zero.consolidate_state_dict()

    def remove(self) -> None:
        """Leave the model to plain DDP, and ``given`` to the loop, as they are after the last step."""
        if self.registration is not None:
            self.registration.remove()
            self.registration = None


def _overlapped(optimizer: Optimizer) -> Optimizer:
    is_ours = isinstance(optimizer, (ZeroRedundancyOptimizer, OptimizerProxy))
    return optimizer if is_ours else OverlappedOptimizer(optimizer)


# A file for each rank in a framework's checkpoint, with the state of its stages.


def save_files(folder: str | Path, rank: int, runs: Sequence[Attachment]) -> None:
    """Write this rank's file, if there is anything to write. Issues nothing: no rank waits for another.

    Raises:
        TrainingLoopError, ConfigurationError: as :func:`overlap.state_dict`.
    """
    file, states = _file(folder, rank), [run.state.rank_state_dict() for run in runs]
    if not any(map(remembers, states)):
        file.unlink(missing_ok=True)  # Of a run that was saved there before.
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(states, file)


def load_files(folder: str | Path, rank: int, runs: Sequence[Attachment]) -> None:
    """Load this rank's file; if no rank has one, stages start without state.

    Raises:
        ConfigurationError: other ranks have one, or it is of other stages or of another number of ranks.
    """
    file = _file(folder, rank)
    if not file.is_file():
        if others := sorted(path.name for path in file.parent.glob(_file(folder, "*").name)):
            raise ConfigurationError(
                f"{file.parent} has {others[0]} and lacks {file.name}: every rank saves, and as many ranks resume; "
                f"delete {_file('', '*')} to start without their state"
            )
        for run in runs:
            run.state.forget()
        return
    states: list[Mapping[str, Any]] = torch.load(file, map_location="cpu", weights_only=True)
    if len(states) != len(runs):
        raise ConfigurationError(f"{file} is of {len(states)} models with a chain, and here are {len(runs)}")
    for run, state in zip(runs, states, strict=True):
        try:
            run.state.load_rank_state_dict(state)
        except ConfigurationError as error:
            error.add_note(f"from {file}; delete {_file('', '*')} there to start without their state")
            raise


def _file(folder: str | Path, rank: int | str) -> Path:
    return Path(folder) / f"overlap-rank-{rank}.pt"
