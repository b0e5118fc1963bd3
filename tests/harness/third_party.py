"""Optimizers as users bring them: written from the papers, each with one habit that PyTorch's own do not have."""

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap import declare

Params = Iterable[Any]
Closure = Callable[[], Any]


class _Simple(Optimizer):
    """`step` calls `begin` once, then `update` for every parameter with a gradient, group by group."""

    def __init__(self, params: Params, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def begin(self) -> None:
        """Once per step, before any parameter is updated."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change `parameter` and `state` in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)


class _Adam(_Simple):
    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


@declare("element")
class Lion(_Simple):
    """Chen et al. 2023, https://arxiv.org/abs/2302.06675: elementwise, the sign of an interpolated momentum."""

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"]
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - beta2)


@declare("parameter")
class LAMB(_Adam):
    """You et al. 2019, https://arxiv.org/abs/1904.00962: each layer's step is scaled by a ratio of whole norms."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** state["step"])
        root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_()
        direction = mean / (root + group["eps"]) + group["weight_decay"] * parameter
        weight_norm, direction_norm = parameter.norm(), direction.norm()
        ratio = torch.where((weight_norm > 0) & (direction_norm > 0), weight_norm / direction_norm, 1.0)
        parameter.sub_(group["lr"] * ratio * direction)


class ClippedLAMB(LAMB):
    """LAMB of gradients that are first clipped by their norm over all parameters, as many implementations have it, so
    that no parameter can be stepped without the others."""

    def __init__(self, params: Params, lr: float = 1e-2, max_norm: float = 0.1) -> None:
        super().__init__(params, lr)
        self.max_norm = max_norm
        self._scale: Tensor | float = 1.0

    def begin(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        self._scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, gradient * self._scale, state, group)


class Prodigy(Optimizer):
    """In the manner of Mishchenko and Defazio 2023, https://arxiv.org/abs/2306.06101: `group["d"]`, an estimate of the
    distance to the solution, is computed from all parameters and scales every step."""

    def __init__(
        self, params: Params, lr: float = 1.0, betas: tuple[float, float] = (0.9, 0.999), d0: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "d": d0, "numerator": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        first = self.param_groups[0]
        d, lr, (beta1, beta2) = first["d"], first["lr"], first["betas"]
        numerator, denominator = first["numerator"] * beta2**0.5, 0.0
        pending = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in pending:
            state = self.state[parameter]
            if not state:
                for name in ("exp_avg", "exp_avg_sq", "s"):
                    state[name] = torch.zeros_like(parameter)
                state["p0"] = parameter.clone()
            numerator += d * d * lr * float((parameter.grad * (state["p0"] - parameter)).sum())
            state["exp_avg"].mul_(beta1).add_(parameter.grad, alpha=d * (1 - beta1))
            state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=d * d * (1 - beta2))
            state["s"].mul_(beta2**0.5).add_(parameter.grad, alpha=d * d * lr)
            denominator += float(state["s"].abs().sum())
        if denominator > 0:
            d = max(d, numerator / denominator)
        for group in self.param_groups:
            group["d"], group["numerator"] = d, numerator
            group["k"] += 1
        for parameter in pending:
            state = self.state[parameter]
            parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(d * 1e-8), value=-d * lr)


@declare("parameter")
class BlockwiseAdamW(_Adam):
    """AdamW whose moments are kept in 8 bits, as in Dettmers et al. 2021, https://arxiv.org/abs/2110.02861.

    A moment is int8 (`state1`, `state2`) with one `absmax` per block of the flattened parameter, rounded to the
    nearest step.
    """

    BLOCK = 64

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = 0
            for place in (1, 2):
                state[f"state{place}"] = torch.zeros_like(parameter, dtype=torch.int8)
                blocks = -(-parameter.numel() // self.BLOCK)
                state[f"absmax{place}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        state["step"] += 1
        mean = self._read(state, 1, parameter).lerp_(gradient, 1 - beta1)
        square = self._read(state, 2, parameter).lerp_(gradient.square(), 1 - beta2)
        step_size = group["lr"] / (1 - beta1 ** state["step"])
        root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, root, value=-step_size)
        self._write(state, 1, mean)
        self._write(state, 2, square)

    def _read(self, state: dict[str, Any], place: int, parameter: Tensor) -> Tensor:
        scale = state[f"absmax{place}"].repeat_interleave(self.BLOCK)[: parameter.numel()].view(parameter.shape)
        codes: Tensor = state[f"state{place}"]
        return codes.to(parameter.dtype) * (scale / 127)

    def _write(self, state: dict[str, Any], place: int, moment: Tensor) -> None:
        missing = -moment.numel() % self.BLOCK
        blocks = torch.nn.functional.pad(moment.reshape(-1), (0, missing)).view(-1, self.BLOCK)
        absmax = blocks.abs().amax(dim=1)
        codes = (blocks / absmax.clamp(min=1e-30)[:, None] * 127).round_().to(torch.int8)
        state[f"absmax{place}"].copy_(absmax)
        state[f"state{place}"].copy_(codes.view(-1)[: moment.numel()].view(moment.shape))


class SGLD(_Simple):
    """Welling and Teh 2011: SGD with Gaussian noise, drawn in `step` from torch's global generator."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.add_(gradient, alpha=-group["lr"]).add_(torch.randn_like(parameter), alpha=1e-3)


class _Counter:
    def __init__(self) -> None:
        self.steps = 0


class CountingSGD(_Simple):
    """SGD whose rate falls with a count of its steps, which it keeps in an object of its own."""

    def __init__(self, params: Params, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        self.counter = _Counter()

    def begin(self) -> None:
        self.counter.steps += 1

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.add_(gradient, alpha=-group["lr"] / self.counter.steps)


class Lookahead(Optimizer):
    """Zhang et al. 2019, https://arxiv.org/abs/1907.08610: every `k` steps of `optimizer` slow weights follow."""

    def __init__(self, optimizer: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer = optimizer
        self.k, self.alpha, self.calls = k, alpha, 0
        self.slow: dict[Tensor, Tensor] = {}
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if not self.slow:
            self.slow = {parameter: parameter.clone() for parameter in parameters}
        self.optimizer.step()
        self.calls += 1
        if self.calls % self.k == 0:
            for parameter in parameters:
                parameter.copy_(self.slow[parameter].lerp_(parameter, self.alpha))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class SAM(Optimizer):
    """Foret et al. 2020, https://arxiv.org/abs/2010.01412: a climb by `rho` along the gradient, a second backward, and
    the base optimizer's step from where the climb began."""

    def __init__(self, params: Params, base: type[Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        pending = self._pending()
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for _, g in pending]))
        for parameter, gradient in pending:
            self.state[parameter]["before"] = parameter.clone()
            parameter.add_(gradient * (self.defaults["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for parameter, _ in self._pending():
            parameter.copy_(self.state[parameter]["before"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def _pending(self) -> list[tuple[Tensor, Tensor]]:
        return [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]


def _of_wrapped(name: str) -> property:
    """An attribute that is the wrapped optimizer's."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


class DelegatingOptimizer(Optimizer):
    """Hands everything on to `optimizer`, as Accelerate's and Lightning's wrappers do.

    It is an `Optimizer` by class, does not call `Optimizer.__init__`, and counts what it hands on.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0

    state: Any = _of_wrapped("state")
    param_groups: Any = _of_wrapped("param_groups")
    defaults: Any = _of_wrapped("defaults")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Closure | None = None) -> Any:
        self.steps += 1
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)


class PropertyWrapper(Optimizer):
    """Hands everything on through `__getattr__` and a `step` that is a property, so that no method of its class shows
    what it does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.__dict__["wrapped"] = optimizer

    def __getattribute__(self, name: str) -> Any:
        if name in ("wrapped", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "wrapped"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)

    @property
    def step(self) -> Any:
        return self.wrapped.step


def patch_step(optimizer: Optimizer) -> Optimizer:
    """`optimizer` itself, its `step` replaced on the instance by one that decays all weights first."""
    plain = optimizer.step

    @torch.no_grad()
    def step(self: Optimizer, closure: Closure | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)
        return plain() if closure is None else plain(closure)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clipping by the global norm, by hand: scales every `.grad` in place, by 1.0 where it does not bind."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
