"""A gradient that may be read and not written, as a tensor subclass.

[Note: guarded gradients]

A gradient that an update has used, or of which this rank has only a part, is handed over as a :class:`GuardedGradient`:
operators that read run on the tensor inside (or raise, for a part), and an operator that writes raises, at the line of
the training loop that writes. So an edit that would be lost is never silent, and nothing has to be compared later.
Views of it are read-only, too; results of other operators are ordinary tensors. Metadata (shape, dtype, device) are the
gradient's own. Another optimizer that has the parameter, too, would apply the gradient again, so a read in its ``step``
is an error. ``Module.to`` moves a parameter and then its gradient: that follows, for an error there would leave half of
a model moved.

Writes are found by the operator's schema, so ``.data``, views, ``foreach`` kernels, autograd's own accumulation and
collectives are covered alike. Memory is not reachable: ``numpy()`` copies, and ``data_ptr()`` is refused.

A gradient refers to its policy weakly. That knows the parameter, whose ``.grad`` Python's garbage collector does not
look into, so that a model with such a gradient would never be collected. One that outlives its model stays read-only.

Private: ``torch.Tensor._make_wrapper_subclass`` and ``_disabled_torch_function_impl``, on which DTensor and torchao
stand.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from overlap._torch.autograd import in_backward
from overlap._torch.optimizer import stepping
from overlap.errors import TrainingLoopError

# As a function, which map takes.
set_grad: Any = vars(torch._C.TensorBase)["grad"].__set__

_ZERO = ("zero_", "_foreach_zero_")
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class DeniedAccess(Enum):
    """An access to a gradient that is read-only, or that may not even be read."""

    WRITE = "write"
    READ = "read"
    ACCUMULATE = "accumulate"  # A backward adds to it.
    UNSCALE = "unscale"  # torch.amp.GradScaler divides it by the scale, or looks whether it is finite.


class GradAccessPolicy:
    """The uses that a loop may make of a set of gradients, and the error for everything else; here of those that
    have outlived their own."""

    @property
    def allows_unscaling(self) -> bool:
        """Whether ``GradScaler`` may unscale the tensor inside."""
        return False

    def check_optimizer(self, gradient: GuardedGradient, optimizer: Optimizer) -> None:
        """``step()`` of ``optimizer``, which has the parameter, uses ``gradient``."""

    def refuse(self, gradient: GuardedGradient, attempt: DeniedAccess) -> NoReturn:
        raise TrainingLoopError(
            "a gradient of a model that no longer exists, or whose registration was removed, cannot be changed; nor "
            "can it be read if it was released, or is the mean over ranks in part only: keep a .clone() of a gradient"
        )

    def follow(self, gradient: GuardedGradient, moved: Tensor) -> None:
        """The parameter has got another dtype, device or memory format, and ``moved`` is ``gradient`` there."""
        self.refuse(gradient, DeniedAccess.WRITE)

    def zero(self, gradient: GuardedGradient) -> None:
        """``zero_()`` was called on ``gradient``, as ``zero_grad(set_to_none=False)`` does."""
        self.refuse(gradient, DeniedAccess.WRITE)


_OUTLIVED = GradAccessPolicy()


class GuardedGradient(Tensor):
    """A gradient under :class:`GradAccessPolicy`. See [Note: guarded gradients].

    Args:
        inner: the gradient itself; ``None`` where there is none to read, such as a released one.
        like: a tensor of its shape, strides, dtype and device.
        parameter: whose gradient it is.
        policy: the uses that the loop may make of it.
        is_readable: whether operators may read it.
    """

    plain: Tensor | None
    is_readable: bool
    parameter: weakref.ref[Tensor]
    _policy: weakref.ref[GradAccessPolicy]

    @staticmethod
    def __new__(
        cls: type[GuardedGradient],
        inner: Tensor | None,
        like: Tensor,
        parameter: weakref.ref[Tensor],
        policy: GradAccessPolicy,
        *,
        is_readable: bool = True,
    ) -> Any:
        return around([inner], [like], [parameter], policy, is_readable=is_readable)[0]

    @property
    def policy(self) -> GradAccessPolicy:
        return self._policy() or _OUTLIVED

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        name = schema.name.rpartition("::")[2]
        given = list(_of_type((*args, *kwargs.values())))
        parameter = given[0].parameter() if given else None
        if parameter is not None and (optimizer := stepping(parameter)) is not None:
            given[0].policy.check_optimizer(given[0], optimizer)
        written = list(_written(schema, args, kwargs)) if schema.is_mutable else []
        if name in _ZERO and written:
            return _zero(args[0])
        if name == _UNSCALE and written:
            if not all(each.policy.allows_unscaling and each.plain is not None for each in written):
                written[0].policy.refuse(written[0], DeniedAccess.UNSCALE)
            return func(*_unwrapped(args), **_unwrapped(kwargs))
        if written:
            written[0].policy.refuse(written[0], DeniedAccess.ACCUMULATE if in_backward() else DeniedAccess.WRITE)
        if func.namespace == "c10d":
            given[0].policy.refuse(given[0], DeniedAccess.WRITE)
        is_view = not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
        hidden = next((each for each in given if not each.is_readable or each.plain is None), None)
        if hidden is not None:
            if is_view and len(given) == 1 and name in ("detach", "alias", "view_as"):
                return hidden  # No value is read: requires_grad_() and .data come here.
            if name == "_to_copy":
                plain = torch.empty_like(hidden.parameter()) if hidden.plain is None else hidden.plain  # type: ignore[arg-type]
                moved = func(plain, *args[1:], **kwargs)
                inner = None if hidden.plain is None else moved
                return GuardedGradient(inner, moved, hidden.parameter, hidden.policy, is_readable=hidden.is_readable)
            hidden.policy.refuse(hidden, DeniedAccess.READ)
        result = func(*_unwrapped(args), **_unwrapped(kwargs))
        if not is_view:
            return result
        first = given[0]
        return tree_map_only(Tensor, lambda view: GuardedGradient(view, view, first.parameter, first.policy), result)

    def read(self) -> Tensor:
        """The tensor inside, to be read. Raises: as the policy says."""
        if self.plain is None or not self.is_readable:
            self.policy.refuse(self, DeniedAccess.READ)
        return self.plain

    # These reach the memory without an operator.

    def numpy(self, *, force: bool = False) -> Any:
        """A copy; the memory itself could be written to."""
        return self.read().clone().numpy(force=force)

    def tolist(self) -> Any:
        return self.read().tolist()

    def _refuse_memory(self, *_: Any) -> NoReturn:
        self.policy.refuse(self, DeniedAccess.WRITE)

    data_ptr = untyped_storage = storage = share_memory_ = set_ = __dlpack__ = _refuse_memory  # type: ignore[assignment]

    @property
    def data(self) -> Any:
        """A view that is read-only, too."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, given: Tensor) -> None:
        parameter = self.parameter()
        if parameter is None or parameter.grad is not self:
            self.policy.refuse(self, DeniedAccess.WRITE)
        if given is self:
            return
        of_self, of_given, now = ((t.dtype, t.device, t.stride()) for t in (self, given, parameter))
        if of_self == now or of_given != now:
            self.policy.refuse(self, DeniedAccess.WRITE)
        self.policy.follow(self, given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An ordinary tensor."""
        return self.read().detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().detach().clone().__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        shown = repr(self.plain) if self.is_readable and self.plain is not None else f"shape={tuple(self.shape)}"
        return f"GuardedGradient({shown})"


def around(
    inners: Iterable[Tensor | None],
    likes: Iterable[Tensor],
    parameters: Iterable[weakref.ref[Tensor]],
    policy: GradAccessPolicy,
    *,
    is_readable: bool,
) -> list[GuardedGradient]:
    """A :class:`GuardedGradient` for each, without a Python call for each."""
    made, known = [], weakref.ref(policy)
    for inner, like, parameter in zip(inners, likes, parameters, strict=True):
        wrapper = Tensor._make_wrapper_subclass(
            GuardedGradient, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        wrapper.plain, wrapper.parameter, wrapper.is_readable, wrapper._policy = inner, parameter, is_readable, known
        made.append(wrapper)
    return made


def _written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[GuardedGradient]:
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _of_type([args[place] if place < len(args) else kwargs.get(argument.name)])


def _of_type(values: Iterable[Any]) -> Iterator[GuardedGradient]:
    for value in values:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, GuardedGradient):
                yield each


def _unwrapped(values: Any) -> Any:
    return tree_map_only(GuardedGradient, lambda each: each.plain, values)


def _zero(given: Any) -> Any:
    for each in given if isinstance(given, (list, tuple)) else (given,):
        if isinstance(each, GuardedGradient):
            each.policy.zero(each)
        else:
            each.zero_()
    return None if isinstance(given, (list, tuple)) else given
