"""One assertion for "the same": state dicts, records of a training run, any nesting of them."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def assert_parity(
    candidate: Any,
    reference: Any,
    *,
    what: str,
    rtol: float = 0.0,
    atol: float = 0.0,
    reason: str | None = None,
) -> None:
    """Fails where two nested structures of tensors and plain values differ, and names the first place.

    Structure, key sets, types, dtypes and shapes must be the same. Values must be equal, NaN being equal to
    NaN, or with a `reason` within `atol + rtol * abs(reference)`; integers and booleans stay exact.

    Raises `ValueError` for a comparison that cannot fail (nothing to compare, a tensor compared with itself)
    and for a tolerance without a reason.
    """
    __tracebackhide__ = True  # pytest would print both structures in full
    if (reason is None) != (max(rtol, atol) <= 0):
        raise ValueError("a tolerance needs a reason: which order of summation, which rounding changes?")
    differences: list[str] = []
    compared = 0
    for path, ours, theirs in _pairs(candidate, reference, ""):
        compared += ours.numel() if isinstance(ours, torch.Tensor) else 1
        difference = _difference(path, ours, theirs, (rtol, atol))
        if difference is not None:
            differences.append(f"{path or 'the value'}: {difference}")
    if compared == 0:
        raise ValueError(f"{what}: there is nothing to compare, so this comparison could never fail")
    if differences:
        allowed = "exactly equal" if reason is None else f"within rtol={rtol:g}, atol={atol:g} ({reason})"
        more = f"\n({len(differences) - 1} more differ)" if len(differences) > 1 else ""
        raise AssertionError(f"{what} should be {allowed}; first difference:\n{differences[0]}{more}")


def assert_equal_ranks(tensors: Iterable[Tensor], what: str = "parameters") -> None:
    """Fails where a rank of the default group holds other values than rank 0, NaN being equal to NaN."""
    __tracebackhide__ = True
    own = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    of_rank_0 = own.clone()
    dist.broadcast(of_rank_0, 0)
    assert_parity(own, of_rank_0, what=f"{what}, beside rank 0")


# Asked first: most of what is compared is one of these.
_LEAVES = (torch.Tensor, int, float, str)


def _pairs(ours: Any, theirs: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, _LEAVES):
        yield path, ours, theirs
    elif dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        for field in dataclasses.fields(ours):
            yield from _pairs(getattr(ours, field.name), getattr(theirs, field.name), f"{path}.{field.name}")
    elif isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        # Keys that only one side has come last: a value that differs says more.
        for key in (key for key in ours if key in theirs):
            yield from _pairs(ours[key], theirs[key], f"{path}[{key!r}]")
        if ours.keys() != theirs.keys():
            added, lacking = (sorted(map(repr, keys)) for keys in (ours.keys() - theirs, theirs.keys() - ours))
            yield f"{path}, keys that one alone has", added, lacking
    elif isinstance(ours, Sequence) and isinstance(theirs, Sequence) and not isinstance(theirs, str | bytes):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from _pairs(one, other, f"{path}[{index}]")
        if len(ours) != len(theirs):
            yield f"{path}, lengths", len(ours), len(theirs)
    else:
        yield path, ours, theirs


def _difference(path: str, ours: Any, theirs: Any, tolerance: tuple[float, float]) -> str | None:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return _tensor_difference(path, ours.detach(), theirs.detach(), tolerance)
    if type(ours) is not type(theirs):
        return f"{type(ours).__name__} against {type(theirs).__name__}"
    if isinstance(ours, float):
        same = ours == theirs or (math.isnan(ours) and math.isnan(theirs))
        rtol, atol = tolerance
        if same or abs(ours - theirs) <= atol + rtol * abs(theirs):
            return None
        return f"{ours!r} against {theirs!r}, difference {abs(ours - theirs):g}"
    return None if ours == theirs else f"{ours!r} against {theirs!r}"


def _tensor_difference(
    path: str, ours: torch.Tensor, theirs: torch.Tensor, tolerance: tuple[float, float]
) -> str | None:
    if ours.dtype != theirs.dtype:
        return f"dtype {ours.dtype} against {theirs.dtype}"
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} against {tuple(theirs.shape)}"
    if ours.numel() == 0:
        return None
    if ours.data_ptr() == theirs.data_ptr():
        raise ValueError(f"{path or 'the value'}: a tensor is compared with itself; record clones")
    ours, theirs = ours.cpu(), theirs.cpu()
    if torch.equal(ours, theirs):
        return None
    wrong = ~((ours == theirs) | (ours.isnan() & theirs.isnan()))
    if not wrong.any():
        return None
    wide = torch.complex128 if ours.is_complex() else torch.float64
    distance = (ours.to(wide) - theirs.to(wide)).abs()
    rtol, atol = tolerance if ours.is_floating_point() or ours.is_complex() else (0.0, 0.0)
    wrong &= ~(distance <= atol + rtol * theirs.to(wide).abs())
    # Under rtol an infinite reference would allow any distance, yet only infinity is close to it.
    wrong |= theirs.isinf() & (ours != theirs)
    if not wrong.any():
        return None
    where = tuple(int(index) for index in wrong.nonzero()[0])
    values = f"{ours[where].item()!r} against {theirs[where].item()!r}"
    return (
        f"max abs difference {distance[wrong].max().item():g}, "
        f"{int(wrong.sum())} of {wrong.numel()} elements, first at {where}: {values}"
    )
