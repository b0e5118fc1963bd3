"""Which optimizers may be stepped in parts.

[Note: known or declared]

An update in backward steps the parameters bucket by bucket, and a sharded one steps some parameters, or some elements
of each, on each rank. That equals one whole ``step()`` only if a part's update depends on that part alone, which the
interface of ``Optimizer`` does not say. So a class is stepped in parts if it is in the table :data:`KNOWN`, or if the
user has declared it. Every entry of the table is checked by an experiment in the tests; a declaration is not checked.

Any other optimizer takes its steps whole: ``Step(OverlappedOptimizer(optimizer), deferred=True)`` calls
``optimizer.step()`` itself, as plain DDP does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, overload
from weakref import WeakKeyDictionary

from torch.optim import Adafactor, Optimizer

from overlap._checks import is_one_of, short_repr, type_name
from overlap._torch.optimizer import own_step, step_hooks
from overlap.errors import ConfigurationError, UnsupportedError

Unit = Literal["element", "parameter"]
"""The smallest part of a model that an optimizer updates by itself."""

T = TypeVar("T", bound=type[Optimizer])

# Of other packages, all of them by parameter: many have options that scale an update by a mean over its parameter, and
# on CPUs the last bit of pow() and exp() depends on an element's place among those that are computed together.
_OTHERS = {
    "adamp": "AdamP SGDP",
    "adan_pytorch": "Adan",
    "came_pytorch": "CAME",
    "lion_pytorch": "Lion",
    "muon": "SingleDeviceMuon SingleDeviceMuonWithAuxAdam",
    "pytorch_optimizer": """
        A2Grad ADOPT AccSGD AdEMAMix AdaBelief AdaDelta AdaFactor AdaMax AdaMod AdaNorm AdaPNM AdaShift AdaSmooth
        AdaTAM Adalite AdamC AdamG AdamP AdamWSN AggMo Aida Ano ApolloDQN BCOS CAME DiffGrad DualAdam EXAdam FAdam
        FOCUS FTRL Fromage Grams GrokFastAdamW Kate LARS LaProp Lion MARS MSVAG Nero NovoGrad PAdam PID PNM QHAdam QHM
        RACS RAdam Ranger SCION SCIONLight SGDP SGDW SM3 SRMM SignSGD SimplifiedAdEMAMix StableAdamW TAM Tiger
        Yogi
    """,
    "timm": """
        AdafactorBigVision AdamP AdamWLegacy Adan Adopt Lars Lion MADGRAD Mars Muon NAdamLegacy NAdamW NvNovoGrad
        RAdamLegacy RMSpropTF SGDP SGDW
    """,
    "torch_optimizer": """
        A2GradExp A2GradInc A2GradUni AccSGD AdaBelief AdaMod AdamP AggMo DiffGrad LARS Lamb NovoGrad PID QHAdam QHM
        SGDP SGDW Yogi
    """,
    "transformers": "Adafactor",
}

KNOWN: Mapping[str, Unit] = {
    "torch.ASGD": "element",
    "torch.Adadelta": "element",
    "torch.Adafactor": "parameter",
    "torch.Adagrad": "element",
    "torch.Adam": "element",
    "torch.AdamW": "element",
    "torch.Adamax": "element",
    "torch.Muon": "parameter",
    "torch.NAdam": "element",
    "torch.RAdam": "element",
    "torch.RMSprop": "element",
    "torch.Rprop": "element",
    "torch.SGD": "element",
    **{f"{package}.{name}": "parameter" for package, names in _OTHERS.items() for name in names.split()},
}
"""Unit by ``"<top-level package>.<ClassName>"``; of ``torch``, those of ``torch.optim``."""

_declared: WeakKeyDictionary[type[Optimizer], Unit] = WeakKeyDictionary()


@overload
def declare(cls: T, unit: Unit) -> T: ...


@overload
def declare(cls: Unit) -> Callable[[T], T]: ...


def declare(cls: T | Unit, unit: Unit | None = None) -> T | Callable[[T], T]:
    """Declare the unit in which a class of optimizers updates, so that it may be stepped in backward or sharded.

    ``"parameter"`` promises that the update of a parameter depends on that parameter, its gradient, its state and its
    group's options alone; ``"element"`` promises the same of each element of a parameter. Both promise that ``step()``

    - draws no random numbers and issues no collectives;
    - keeps no state beside that of the parameters, and needs no hook that runs before it;
    - writes to a group, or to an attribute of the optimizer, nothing but plain values (a count of calls) that are the
      same whichever parameters are stepped;
    - runs its kernels on the current stream, as those of bitsandbytes do not.

    The optimizers of ``torch.optim`` and many others are known without a declaration. A derived class, which may
    override anything, is declared anew. **A declaration is not checked: if it is wrong, the training is silently
    wrong.** An optimizer for which none is right works with ``Step(OverlappedOptimizer(optimizer), deferred=True)``,
    which calls ``optimizer.step()`` itself.

    Use it as a function, ``declare(Lion, "element")``, or as a decorator of the class, ``@declare("element")``.

    Args:
        cls: the class of the optimizer; for ``ZeroRedundancyOptimizer``, that of the one inside.
        unit: ``"element"`` or ``"parameter"``.

    Returns:
        ``cls``.

    Raises:
        ConfigurationError: ``cls`` is not a subclass of ``torch.optim.Optimizer``, or is of bitsandbytes; or there is
            no such ``unit``.

    >>> @declare("element")
    ... class SignSGD(torch.optim.Optimizer): ...
    >>> declare(SignSGD, "parameter") is SignSGD
    True
    """
    if isinstance(cls, str) and unit is None:
        only: Unit = _checked(cls)
        return lambda decorated: declare(decorated, only)
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        instead = f"declare(type(optimizer), {unit!r})" if isinstance(cls, Optimizer) else 'declare(Lion, "element")'
        raise ConfigurationError(f"declare takes a class of optimizers, got {type_name(cls)}; use {instead}")
    if _is_on_default_stream(cls):
        raise ConfigurationError(f"{cls.__name__} is not to be declared: {_ON_DEFAULT_STREAM}")
    _declared[cls] = _checked(unit, cls.__name__)
    return cls


_ON_DEFAULT_STREAM = (
    "the kernels of bitsandbytes run on the default stream, where gradients may not be reduced yet; use "
    "chain(AllReduce(), Step(OverlappedOptimizer(optimizer), deferred=True))"
)


def _is_on_default_stream(cls: type) -> bool:
    return any(base.__module__.partition(".")[0] == "bitsandbytes" for base in cls.__mro__)


def _checked(unit: object, name: str = "Lion") -> Unit:
    if not is_one_of(unit, "element", "parameter"):
        raise ConfigurationError(
            f'unit is "element" or "parameter", got {short_repr(unit)}; use declare({name}, "parameter") where the '
            'update of a parameter depends on that parameter alone, declare(..., "element") where that of an element '
            "does"
        )
    return unit  # type: ignore[return-value]


def unit_of(optimizer: Optimizer | type[Optimizer]) -> Unit | None:
    """The unit in which ``optimizer`` (or the class) updates; ``None`` where it is neither known nor declared."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if (unit := _declared.get(cls)) is not None:
        return unit
    package = cls.__module__.partition(".")[0]
    if package == "torch" and not cls.__module__.startswith("torch.optim"):
        return None
    return KNOWN.get(f"{package}.{cls.__qualname__}")


def check_unit(optimizer: Optimizer | type[Optimizer], *, instead: str) -> Unit:
    """:func:`unit_of`; ``instead`` says how to step any optimizer whole.

    Raises: UnsupportedError: it is neither known nor declared.
    """
    unit = unit_of(optimizer)
    if unit is not None:
        return unit
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    name = cls.__name__
    if _is_on_default_stream(cls):
        raise UnsupportedError(f"{name} cannot be stepped in parts: {_ON_DEFAULT_STREAM}")
    bases = [f"; {base.__name__} is" for base in cls.__mro__[1:] if issubclass(base, Optimizer) and unit_of(base)]
    raise UnsupportedError(
        f"{name} is neither known nor declared{''.join(bases[:1])}, so its update cannot be made in parts. If its "
        "update of a parameter depends on that parameter, its state and its group's options alone, declare it: "
        f'overlap.declare({name}, "parameter") (or "element", if the same holds for each element). Otherwise use '
        f"{instead}, which calls optimizer.step() itself and is exact for any optimizer"
    )


def check_nothing_before(optimizer: Optimizer) -> None:
    """Raises: UnsupportedError: something must run before the update, or in place of it."""
    name = type(optimizer).__name__
    if own_step(optimizer) is not None:
        raise UnsupportedError(
            f"step() of this {name} was replaced on the object, and an update in backward would not call it; use "
            "Step(OverlappedOptimizer(optimizer), deferred=True)"
        )
    for hook in step_hooks(optimizer)[0]:
        if not str(getattr(hook, "__module__", "")).startswith("overlap."):  # Those of this library only watch.
            raise UnsupportedError(
                f"the step pre-hook {getattr(hook, '__qualname__', repr(hook))} must run before the update of this "
                f"{name}, when all gradients are there, but updates are made while backward runs; use "
                "Step(OverlappedOptimizer(optimizer), deferred=True)"
            )


def check_one_eps(optimizer: Optimizer, *, instead: str) -> None:
    """Raises: UnsupportedError: the eps of Adafactor depends on which parameter of a group comes first."""
    for group in optimizer.param_groups if isinstance(optimizer, Adafactor) else ():
        dtypes = sorted({str(parameter.dtype) for parameter in group["params"]})
        if group["eps"][0] is None and len(dtypes) > 1:
            raise UnsupportedError(
                f"updating in parts would not equal one step of {type(optimizer).__name__}: its eps[0] is None, which "
                f"for all parameters of a group becomes that of the first one's dtype, and a group has "
                f"{' and '.join(dtypes)}; give a number, or a group to each dtype, or use {instead}"
            )
