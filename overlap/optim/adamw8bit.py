"""AdamW with its moments in eight bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import as_list, told
from overlap._torch.device import has_streams
from overlap._torch.state_dict_hooks import after_load_state_dict, before_load_state_dict, load_hooks_suspended
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.adamw8bit_options import REFUSED, check_options, refuse_options
from overlap.optim.adamw8bit_state import FIRST, MAPS, SCALE, SECOND, check_blocks, checked_states, loaded, new_state
from overlap.optim.declared import declare
from overlap.optim.state_blocks import StateBlocks

__all__ = ["AdamW8bit"]

# Elements at a time. On a CPU so few that what is decoded stays in the cache, and so many that calls take little time
# beside the computation; on a device with streams, to bound what is decoded.
_CACHED_NUMEL = 256 * 1024
_DEVICE_NUMEL = 16 * 1024 * 1024


@declare("element")
class AdamW8bit(Optimizer):
    """:class:`torch.optim.AdamW` with both moments in 8 bits an element: state of a quarter of the size.

    Moments are kept as in Dettmers et al. 2022 (https://arxiv.org/abs/2110.02861): each block of consecutive elements
    of ``parameter.flatten()`` has its largest magnitude as its scale, in fp32, and its elements as codes of a
    non-linear map (``overlap/optim/dynamic_map.py`` says in what it differs). An update decodes a few blocks at a time,
    computes in fp32, and encodes again. Nothing is random, so the same gradients make the same update.

    Blocks are independent of each other. So :class:`ZeroRedundancyOptimizer` divides parameters between blocks, and its
    update is that of the whole optimizer bit for bit.

    State of a parameter: ``step``, a number; ``exp_avg`` and ``exp_avg_sq``, uint8 in the parameter's shape, and
    ``exp_avg_scale`` and ``exp_avg_sq_scale``, fp32 of shape ``(ceil(numel / block_numel),)``. Of parameters of fewer
    than ``min_numel`` elements, the moments are in fp32, and the update is that of :class:`torch.optim.AdamW`.

    A gradient that is not finite makes all moments of its block not finite; with :class:`torch.optim.AdamW` only those
    of its element.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as for :class:`torch.optim.AdamW`. ``lr`` is a number, or a
            tensor of one on the CPU.
        block_numel: the elements of a block, a multiple of 64. Fewer are more exact, and take ``8 / block_numel`` bytes
            more an element.
        min_numel: parameters of fewer elements have moments in fp32, as in the paper.
        amsgrad, foreach, capturable, differentiable, fused: of :class:`torch.optim.AdamW`, and refused if set.

    Raises:
        ConfigurationError: an argument is out of range.
        UnsupportedError: an argument is one that this optimizer does not have, or a parameter is complex; in
            :meth:`step`, a gradient is sparse.

    >>> model = torch.nn.Linear(128, 64)
    >>> optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> {key: value.dtype for key, value in optimizer.state[model.weight].items()}  # doctest: +NORMALIZE_WHITESPACE
    {'step': torch.float32, 'exp_avg': torch.uint8, 'exp_avg_sq': torch.uint8, 'exp_avg_scale': torch.float32,
     'exp_avg_sq_scale': torch.float32}
    """

    state_by_block = (SCALE.format(FIRST), SCALE.format(SECOND))
    """The keys of the state that have one number for each block. See [Note: state in blocks]."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        block_numel: int = 256,
        min_numel: int = 4096,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        refuse_options(
            amsgrad=amsgrad, foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "block_numel": block_numel,
            "min_numel": min_numel,
        }
        check_options(defaults)
        given = None if isinstance(params, (str, bytes)) else as_list(params)
        if given is None:
            raise ConfigurationError(f"params is an iterable of parameters or of groups, got {told(params)}")
        super().__init__(given, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As any optimizer's.

        Raises:
            ConfigurationError: an option is out of range.
            UnsupportedError: an option is one that this optimizer does not have, or a parameter is complex.
        """
        if isinstance(param_group, Mapping):
            refuse_options(**{key: param_group[key] for key in REFUSED if key in param_group})
            check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            del self.param_groups[-1]
            raise UnsupportedError("AdamW8bit takes real parameters; give complex ones to torch.optim.AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            blocks = StateBlocks.of(self, group)
            assert blocks is not None, "the options are those of every group"
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    self._update(parameter, parameter.grad, group, blocks)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any], blocks: StateBlocks) -> None:
        if gradient.is_sparse:
            raise UnsupportedError("AdamW8bit takes dense gradients: build the embedding with sparse=False")
        state = self.state[parameter]
        if not state:
            state.update(new_state(parameter, blocks))
        state["step"] += 1
        hyper = _Hyper(group, int(state["step"]))
        # Blocks are of elements in this order, whatever the memory format. A copy if that is another one.
        values = parameter.detach().reshape(-1)
        gradients = gradient.reshape(-1)
        check_blocks(state, parameter, blocks)
        if blocks.keys[0] in state:
            for rows in _rows(parameter.numel(), blocks.numel, parameter.device):
                _step_rows(values, gradients, state, rows, hyper)
        else:
            hyper.apply(values, gradients, state[FIRST].view(-1), state[SECOND].view(-1))
        if values.data_ptr() != parameter.data_ptr():
            parameter.copy_(values.view(parameter.shape))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; every value keeps the dtype in which it was saved.

        Raises:
            ConfigurationError: it is another optimizer's, or one of other parameters. Moments of
                :class:`torch.optim.AdamW` are not encoded.
        """
        given = _with_options(self, before_load_state_dict(self, state_dict))
        states = checked_states(self, given)
        of_parameters = set(states)
        others = {key: value for key, value in given["state"].items() if key not in of_parameters}
        with load_hooks_suspended(self):
            # Only what belongs to no parameter: it would load moments in the parameter's dtype.
            super().load_state_dict({**given, "state": others})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        keys = [key for group in given["param_groups"] for key in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            if key in states and parameter.numel():  # As at the first step: others have nothing to keep.
                self.state[parameter] = {
                    name: loaded(value, parameter.device if name != "step" else torch.device("cpu"))
                    for name, value in states[key].items()
                }
        after_load_state_dict(self)


class _Hyper:
    """The hyperparameters of one update of one parameter."""

    def __init__(self, group: Mapping[str, Any], step: int) -> None:
        self.lr, self.eps, self.is_ascent = float(group["lr"]), group["eps"], group["maximize"]
        self.beta1, self.beta2 = group["betas"]
        self.shrinkage = 1 - self.lr * group["weight_decay"]
        self.step_size = self.lr / (1 - self.beta1**step)
        self.root_bias = (1 - self.beta2**step) ** 0.5

    def apply(self, values: Tensor, gradients: Tensor, first: Tensor, second: Tensor) -> None:
        """AdamW's update (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101, algorithm 2) of ``values`` and
        both moments, flat and of one length; the moments are fp32."""
        gradients = gradients.float()
        if self.is_ascent:
            gradients = gradients.neg()
        first.lerp_(gradients, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(gradients, gradients, value=1 - self.beta2)
        denominators = second.sqrt().div_(self.root_bias).add_(self.eps)
        exact = values.to(torch.promote_types(values.dtype, torch.float32))  # Itself, if it is fp32.
        exact.mul_(self.shrinkage).addcdiv_(first, denominators, value=-self.step_size)
        if exact is not values:
            values.copy_(exact)


def _step_rows(
    values: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rows: tuple[slice, slice], hyper: _Hyper
) -> None:
    """The update of the elements of some blocks that are all of one length: ``rows`` are these elements and blocks."""
    elements, of_blocks = rows
    count = of_blocks.stop - of_blocks.start
    codes = {key: state[key].view(-1)[elements].view(count, -1) for key in MAPS}
    scales = {key: state[SCALE.format(key)][of_blocks] for key in MAPS}
    moments = {key: a_map.decode(codes[key], scales[key]) for key, a_map in MAPS.items()}
    hyper.apply(values[elements], gradients[elements], *(moment.view(-1) for moment in moments.values()))
    for key, a_map in MAPS.items():
        a_map.encode(moments[key], codes[key], scales[key])


def _rows(numel: int, block_numel: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Some whole blocks at a time, and by itself the rest: slices of the elements and of the blocks."""
    at_once = _DEVICE_NUMEL if has_streams(device) else _CACHED_NUMEL
    step, whole = max(1, at_once // block_numel), numel // block_numel
    for first in range(0, whole, step):
        last = min(first + step, whole)
        yield slice(first * block_numel, last * block_numel), slice(first, last)
    if whole * block_numel < numel:
        yield slice(whole * block_numel, numel), slice(whole, whole + 1)


_MEMBERS = ("params", "param_names")


def _with_options(optimizer: AdamW8bit, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given``, whose groups have all options: those that another optimizer does not have are as they are now."""
    if not {"state", "param_groups"} <= set(given):
        raise ConfigurationError(f"this is not a state_dict of an optimizer: its keys are {sorted(map(str, given))}")
    groups = list(given["param_groups"])
    for place, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        refuse_options(amsgrad=saved.get("amsgrad"))
        groups[place] = {**{key: value for key, value in group.items() if key not in _MEMBERS}, **saved}
    return {**given, "param_groups": groups}
