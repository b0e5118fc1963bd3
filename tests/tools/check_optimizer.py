"""The experiment behind the table of known optimizers: steps whole and in parts, compared bit for bit."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness import assert_parity
from overlap.optim.stepper import SubsetStepper

STEPS = 12
# Gradients of very different sizes, for estimates that settle, and steps in which some parameters have none.
_SCALES = (1.0, 1e-3, 30.0, 0.1, 1e-5, 3.0)
_GROUPS = (((12, 16), (192,), (4, 6, 8)), ((96, 86), (8256,), (12, 4, 2, 2), (80, 3)))
_MATRICES = (((12, 16), (24, 8)), ((96, 86), (80, 3), (16, 16)))
# Whole vectors of any dtype, but no multiple of the blocks of which blockwise state is made.
_SMALL_CUT, _LARGE_CUT, _LARGE_FROM = 96, 2784, 4096

Make = Callable[[list[Any]], Optimizer]
Gradients = list[list[Tensor | None]]


def check(
    cls: Callable[..., Optimizer],
    *,
    only_matrices: bool = False,
    all_have_gradients: bool = False,
    **options: Any,
) -> dict[str, str]:
    """How an optimizer may be stepped: ``""`` where it comes out as a whole ``step()`` does, otherwise what differs.

    Parameters, state, groups and plain attributes are compared bit for bit after each of 12 steps.

    Args:
        cls: makes the optimizer of groups and ``options``.
        only_matrices: there are no others, for classes that take no others.
        all_have_gradients: in every step, for classes that need one of every parameter.
        **options: of ``cls``.

    Returns:
        ``"interleaved"``: parameter by parameter, as in the smallest buckets there can be; ``"parameter"``: some
        parameters on each of two ranks; ``"element"``: some elements of each parameter on each, flat. On ranks, too,
        each parameter is a bucket.
    """
    shapes = _MATRICES if only_matrices else _GROUPS
    generator = torch.Generator().manual_seed(1)
    values = [[torch.randn(shape, generator=generator) * 0.5 for shape in group] for group in shapes]
    gradients = [
        [_gradients(step, group, generator, all_there=all_have_gradients) for group in values] for step in range(STEPS)
    ]

    def make(pieces: Callable[[int, Tensor], Tensor | None]) -> tuple[Optimizer, list[list[Tensor | None]]]:
        own = [[pieces(place, value) for place, value in enumerate(group)] for group in values]
        leaves = [[None if p is None else nn.Parameter(p.clone()) for p in group] for group in own]
        groups = [{"params": [p for p in group if p is not None]} for group in leaves]
        if "weight_decay" in options:  # Groups of different options.
            groups[0]["weight_decay"] = 2 * options["weight_decay"]
        optimizer = cls(groups, **options)
        return optimizer, leaves  # type: ignore[return-value]

    def tried(parts: Sequence[Callable[[int, Tensor], Tensor | None]]) -> str:
        try:
            return _compare(make, whole, gradients, parts)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = _step_whole(*make(_everything), gradients)
        return {
            "interleaved": tried([_everything]),
            "parameter": tried([_every_second(0), _every_second(1)]),
            "element": tried([_first_part, _second_part]),
        }


def _gradients(step: int, values: list[Tensor], generator: torch.Generator, *, all_there: bool) -> list[Tensor | None]:
    """Away from zero; in step 5 the second parameter of each group has none, and in step 7 no parameter of a group."""
    made: list[Tensor | None] = []
    for place, value in enumerate(values):
        noise = torch.randn(value.shape, generator=generator)
        gradient = (noise + noise.sign() * 0.1) * _SCALES[(step + place) % len(_SCALES)]
        is_there = not (step == 5 and place == 1) and not (step == 7 and len(values) == 3)
        made.append(gradient if is_there or all_there else None)
    return made


def _everything(place: int, value: Tensor) -> Tensor:
    return value


def _every_second(rank: int) -> Callable[[int, Tensor], Tensor | None]:
    return lambda place, value: value if place % 2 == rank else None


def _cut(value: Tensor) -> int:
    return _LARGE_CUT if value.numel() >= _LARGE_FROM else min(_SMALL_CUT, value.numel())


def _first_part(place: int, value: Tensor) -> Tensor:
    return value.flatten()[: _cut(value)]


def _second_part(place: int, value: Tensor) -> Tensor:
    return value.flatten()[_cut(value) :]


def _step_whole(optimizer: Optimizer, leaves: Any, gradients: list[Gradients]) -> list[dict[str, Any]]:
    histories = []
    for step in gradients:
        for parameter, gradient in zip(_flat(leaves), _flat(step), strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        histories.append(_snapshot(optimizer, _flat(leaves)))
    before, after = histories[0]["parameters"], histories[-1]["parameters"]
    for one, other in zip(before, after, strict=True):
        assert bool(torch.isfinite(other).all()), "its parameters became infinite or NaN in the experiment"
        assert not torch.equal(one, other), "it left parameters as they were in the experiment"
    return histories


def _compare(
    make: Callable[..., Any],
    whole: list[dict[str, Any]],
    gradients: list[Gradients],
    parts: Sequence[Callable[[int, Tensor], Tensor | None]],
) -> str:
    for pieces in parts:
        optimizer, leaves = make(pieces)
        stepper = SubsetStepper(optimizer)
        places = [place for group in leaves for place in range(len(group))]
        kept = [place for place, parameter in enumerate(_flat(leaves)) if parameter is not None]
        for number, (step, history) in enumerate(zip(gradients, whole, strict=True)):
            stepper.begin()
            for place in reversed(kept):
                gradient = _flat(step)[place]
                if gradient is not None:
                    piece = pieces(places[place], gradient)
                    stepper.step([_flat(leaves)[place]], [piece.clone()])  # Some optimizers change it in place.
            stepper.finish()
            expected = {
                **history,
                "parameters": [pieces(places[place], history["parameters"][place]) for place in kept],
                "state": [_of_piece(history, place, pieces, places) for place in kept],
            }
            found = _snapshot(optimizer, [_flat(leaves)[place] for place in kept])
            try:
                assert_parity(found, expected, what="a step in parts")
            except AssertionError as error:
                return f"it differs after step {number + 1}: {error}"
    return ""


def _of_piece(history: Mapping[str, Any], place: int, pieces: Callable[..., Any], places: Sequence[int]) -> Any:
    """State of the shape of its parameter is cut as it is."""
    parameter, state = history["parameters"][place], history["state"][place]
    return {
        key: pieces(places[place], value) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for key, value in state.items()
    }


def _flat(groups: Any) -> list[Any]:
    return [each for group in groups for each in group]


def _snapshot(optimizer: Optimizer, parameters: Sequence[Tensor]) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple, type(None))
    return {
        "parameters": [parameter.detach().clone() for parameter in parameters],
        "state": [copy.deepcopy(optimizer.state.get(parameter, {})) for parameter in parameters],
        "group": [
            copy.deepcopy({key: value for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ],
        "attribute": {k: v for k, v in vars(optimizer).items() if isinstance(v, plain) and k != "_opt_called"},
    }
