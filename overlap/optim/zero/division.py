"""How an optimizer's work may be divided among ranks: by element, by parameter, or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import is_one_of, told
from overlap.errors import ConfigurationError, OverlapError, UnsupportedError
from overlap.optim.group_kinds import kinds_of
from overlap.optim.probe import Separability, Verdict, probe
from overlap.optim.subset import check_optimizer
from overlap.optim.zero.parameter_groups import is_narrower
from overlap.optim.zero.update_cost import orthogonalization_steps

__all__ = ["Experiments", "check_division", "check_steps_in_turn", "choose_partition", "make_optimizer"]

PARTITIONS = ("element", "parameter")

# Large enough for an optimizer to treat a stand-in as it treats the large parameter for which it stands.
_STAND_IN_NUMEL = 4096


class Experiments:
    """What the experiment says of ``cls``, repeated only for new kinds of groups.

    See [Note: what an optimizer couples].

    Args:
        cls: the optimizer's class.
        defaults: its arguments.
        master_dtype: of the copies of parameters that it steps; ``None``: it steps the parameters themselves.
    """

    def __init__(
        self, cls: type[Optimizer], defaults: Mapping[str, Any], *, master_dtype: torch.dtype | None = None
    ) -> None:
        self._cls = cls
        self._defaults = defaults
        self._master_dtype = master_dtype
        self._found: dict[Hashable, Separability] = {}

    def separability_of(self, groups: Sequence[Mapping[str, Any]]) -> Separability:
        """How ``cls`` may be stepped with these groups; does not touch their parameters.

        Raises:
            ConfigurationError: ``cls`` does not take the arguments.
            UnsupportedError: ``cls`` needs a closure or sparse gradients.
        """
        optimizer = self._small(groups)
        kinds = kinds_of(optimizer.param_groups)
        if kinds not in self._found:
            self._found[kinds] = probe(optimizer)
        return self._found[kinds]

    def orthogonalizes(self, groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """In how many steps ``cls`` orthogonalizes the matrices of each group; 0 where it does not."""
        return [orthogonalization_steps(group) for group in self._small(groups).param_groups]

    def _small(self, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
        stand_ins = [{**group, **_stand_ins(group, self._master_dtype)} for group in groups]
        return check_optimizer(make_optimizer(self._cls, stand_ins, self._defaults))


def make_optimizer(cls: type[Optimizer], groups: Any, defaults: Mapping[str, Any]) -> Optimizer:
    """``cls(groups, **defaults)``.

    Raises:
        ConfigurationError: ``cls`` does not take the arguments.
    """
    try:
        return cls(groups, **defaults)
    except OverlapError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{cls.__name__}: {error}") from error


def choose_partition(cls: type[Optimizer], found: Separability, partition: str | None) -> str:
    """``partition`` if it is given and right; otherwise the finest one that is.

    Warns if nothing could be found out, and ``partition`` is ``None``.

    Raises:
        ConfigurationError: there is no such ``partition``.
        UnsupportedError: as :func:`check_division`.
    """
    if partition is not None:
        if not is_one_of(partition, *PARTITIONS):
            raise ConfigurationError(f"partition is 'element' or 'parameter', got {told(partition)}")
        check_division(cls, found, partition)
        return partition
    for finest, finding in zip(PARTITIONS, (found.by_element, found.by_parameter), strict=True):
        if finding.verdict is Verdict.SEPARABLE:
            check_division(cls, found, finest)
            return finest
    check_division(cls, found, "parameter")
    warnings.warn(
        f"whether {cls.__name__} computes anything from several parameters at once could not be found out "
        f"({found.by_parameter.why}); if it does, ZeRO is not the same as plain DDP. Each rank now steps whole "
        "parameters. Pass partition='parameter' if each parameter is updated by itself, partition='element' if each "
        "element is",
        UserWarning,
        stacklevel=3,
    )
    return "parameter"


def check_division(cls: type[Optimizer], found: Separability, partition: str) -> None:
    """Raises: UnsupportedError: ranks that divide the work by ``partition`` would not do what ``cls`` does."""
    if found.draws:
        raise UnsupportedError(
            f"{cls.__name__}.step() draws random numbers ({', '.join(found.draws)}), and each rank would draw others "
            "for its part: use plain DDP with it"
        )
    if found.by_parameter.verdict is Verdict.COUPLED and found.by_element.verdict is not Verdict.SEPARABLE:
        raise UnsupportedError(
            f"{cls.__name__} does not update each parameter by itself ({found.by_parameter.why}), so its work cannot "
            "be divided among ranks: use plain DDP with it, or chain(AllReduce(), Step(optimizer, deferred=True))"
        )
    if partition == "element" and found.by_element.verdict is Verdict.COUPLED:
        raise UnsupportedError(
            f"{cls.__name__} does not update each element by itself ({found.by_element.why}): use "
            "partition='parameter', or leave partition out"
        )
    if partition == "parameter" and found.by_parameter.verdict is Verdict.COUPLED:
        raise UnsupportedError(
            f"{cls.__name__} does not update each parameter by itself ({found.by_parameter.why}): use "
            "partition='element', or leave partition out"
        )


def check_steps_in_turn(cls: type[Optimizer], found: Separability) -> None:
    """Raises: UnsupportedError: one step of ``cls`` is not the same as stepping some parameters after others."""
    if found.in_turn.verdict is Verdict.COUPLED:
        raise UnsupportedError(
            f"{cls.__name__} cannot be stepped bucket by bucket ({found.in_turn.why}): use "
            "ZeroStep(zero, deferred=True), which steps all of them at once"
        )


def _stand_ins(group: Mapping[str, Any], master_dtype: torch.dtype | None) -> dict[str, Any]:
    """The parameters of a group, each in a few elements. Of those that are alike the first stands for all."""
    names = group.get("param_names")
    chosen: dict[tuple[Any, ...], tuple[Tensor, str | None]] = {}
    for place, parameter in enumerate(group["params"]):
        numel = min(parameter.numel(), _STAND_IN_NUMEL)
        dtype = master_dtype if is_narrower(parameter, master_dtype) else parameter.dtype
        shape = (*(1,) * (parameter.dim() - 1), numel) if parameter.dim() else ()
        key = (shape, dtype, parameter.device, parameter.requires_grad)
        if key not in chosen:
            tensor = torch.zeros(shape, dtype=dtype, device=parameter.device, requires_grad=parameter.requires_grad)
            chosen[key] = tensor, names[place] if names else None
    stand_ins: dict[str, Any] = {"params": [tensor for tensor, _ in chosen.values()]}
    return {**stand_ins, "param_names": [name for _, name in chosen.values()]} if names else stand_ins
