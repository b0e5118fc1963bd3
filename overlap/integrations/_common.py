"""Shared by the integrations: a chain on the model and the optimizers that a framework has made, and its files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._checks import check_ddp, described
from overlap.errors import ConfigurationError
from overlap.hooks import Registration, Role, Stage, chain
from overlap.hooks.stage import walk
from overlap.optim import LocalSGD, OverlappedOptimizer, ZeroRedundancyOptimizer
from overlap.optim.lifecycle import Form, Phase, UpdateLifecycle
from overlap.optim.optimizer import OptimizerProxy
from overlap.optim.update import Update
from overlap.resume import TrainState
from overlap.resume.train_state import remembers

__all__ = ["ChainFor", "LocalSGDFor", "Recipe", "Run", "load_files", "needs", "save_files"]

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
        raise ImportError(
            f"overlap.integrations.{extra} needs the package {extra}: pip install '.[{extra}]' in a clone of overlap",
            name=error.name,
        ) from error


@dataclass(frozen=True)
class Recipe:
    """What a user gave, before there is a model.

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
                    f"got {described(given)}"
                )


_EXAMPLES = {
    "chain": "lambda optimizer: chain(AllReduce(), Step(optimizer)), or a stage that makes no update",
    "local_sgd": "functools.partial(LocalSGD, period=8, start_step=1000)",
}


class Run:
    """A recipe carried out: registered with ``model`` until :meth:`remove`.

    Args:
        recipe: what to register.
        model: in DDP.
        optimizers: the framework's, without wrappers.
        late: what the framework does with gradients after backward, such as ``max_grad_norm=1.0 clips after backward``;
            interleaved updates of the chain are then deferred. Empty: nothing.
        instead: what else to do where an update cannot be deferred, for the message.

    Raises:
        ConfigurationError: the recipe returned something else, or does not fit; and as registering does.
    """

    def __init__(
        self, recipe: Recipe, model: Any, optimizers: Sequence[Optimizer], *, late: str = "", instead: str = ""
    ) -> None:
        self.ddp = check_ddp(model)
        self.given = list(optimizers)
        self.optimizers: list[Any] = list(optimizers)
        """What the training loop is to step, in the place of those given."""
        self.registration: Registration | None = None
        if recipe.local_sgd is not None:
            if len(self.given) != 1:
                raise ConfigurationError(f"local_sgd takes one optimizer, and there are {len(self.given)}")
            local = recipe.local_sgd(self.ddp, self.given[0])
            if not isinstance(local, LocalSGD):
                raise ConfigurationError(f"local_sgd returned {described(local)}, and not a LocalSGD")
            self.optimizers, self.registration = [local], local.registration
        elif recipe.chain is not None:
            made: Any = recipe.chain
            if not isinstance(made, Stage):
                self.optimizers = [_overlapped(one) for one in self.given]
                made = made(*self.optimizers)
                made = chain(*made) if isinstance(made, (list, tuple)) else made
                if not isinstance(made, Stage):
                    raise ConfigurationError(
                        f"chain is a function of the optimizer that returns a stage, such as {_EXAMPLES['chain']}; it "
                        f"returned {described(made)}"
                    )
                if not any(isinstance(stage, Update) for stage in walk(made)):
                    self.optimizers = list(optimizers)
            for update in walk(made) if late else ():
                if not isinstance(update, Update) or _is_left(update):
                    continue
                update.defer()
                if not _is_left(update):
                    raise ConfigurationError(
                        f"{late}, but {update!r} has made the update in backward by then: use "
                        f"{update.form.deferred_code}{instead}"
                    )
                _logger.info("%s: the update of the chain is %r", late, update)
            self.registration = chain(made).register(self.ddp)
        # What all ranks have alike is in the framework's own checkpoint; ranks of local SGD have little alike.
        self.state = TrainState(self.ddp, self.optimizers, stages_only=recipe.local_sgd is None)
        """What the framework's own checkpoint lacks."""

    @property
    def is_local(self) -> bool:
        """Whether ranks have models of their own, between two averages."""
        return any(isinstance(one, LocalSGD) for one in self.optimizers)

    @property
    def sharded(self) -> list[ZeroRedundancyOptimizer]:
        """The optimizers whose state is divided among the ranks."""
        return [one for one in self.optimizers if isinstance(one, ZeroRedundancyOptimizer)]

    def has_any(self, parameters: Sequence[Tensor]) -> bool:
        """Whether one of ``parameters`` is the model's."""
        own = set(map(id, self.ddp.parameters()))
        return any(id(parameter) in own for parameter in parameters)

    @property
    def updates(self) -> dict[Stage, Form]:
        """The updates in the chain, and when each is made."""
        stages = [] if self.registration is None else walk(self.registration.stage)
        lifecycles = {stage: getattr(stage, "lifecycle", None) for stage in stages if stage.role is Role.UPDATE}
        return {stage: its.form for stage, its in lifecycles.items() if isinstance(its, UpdateLifecycle)}

    @property
    def makes_updates_in_backward(self) -> bool:
        """Whether an update in the chain is made in backward, so that its gradients are read-only after it."""
        return any(form.outcome is not Phase.REDUCED for form in self.updates.values())

    @property
    def hides_gradients(self) -> bool:
        """Whether the gradients of an update cannot be read: a rank has its part alone, or they are released."""
        releases = any(isinstance(one, Update) and one.releases_gradients for one in self.updates)
        return releases or bool(self.sharded and self.updates)

    def consolidate(self) -> None:
        """Gather divided states on rank 0, whose ``state_dict()`` a framework saves; every rank calls it."""
        for zero in self.sharded:
            zero.consolidate_state_dict()

    def remove(self) -> None:
        """Leave the model to plain DDP, and ``given`` to the loop, as they are after the last step."""
        if self.registration is not None:
            self.registration.remove()
            self.registration = None


def _is_left(update: Update[Any]) -> bool:
    """Whether ``step()`` makes the update."""
    return update.form.outcome is Phase.REDUCED


def _overlapped(optimizer: Optimizer) -> Optimizer:
    is_ours = isinstance(optimizer, (ZeroRedundancyOptimizer, OptimizerProxy))
    return optimizer if is_ours else OverlappedOptimizer(optimizer)


# A file for each rank in a framework's checkpoint, with the state of its stages.


def save_files(folder: str | Path, rank: int, runs: Sequence[Run]) -> None:
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


def load_files(folder: str | Path, rank: int, runs: Sequence[Run]) -> None:
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
