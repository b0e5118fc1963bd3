"""Gathers new parameters during the next forward, and has its modules wait for them.

[Note: who waits]

A gather during the next forward writes parameters while the training thread goes on. So each module of the registered
model waits, before its forward, for its own parameters. Some modules use the parameters of other modules without
calling them: ``nn.MultiheadAttention`` reads its ``out_proj.weight``. The first forward, before any gather, shows which
modules are called at all. If a module is not called, the nearest module above it that is called waits for its
parameters. In evaluation a module waits for all parameters below it, since fast paths read them. ``state_dict()``
waits, too. Nothing else does: call ``zero.wait()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from overlap._torch.modules import move_to_front
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks import StageContext
from overlap.hooks.engine.background import Completion
from overlap.optim.zero.exchange import Exchange, Gather

__all__ = ["ParameterPrefetch"]


class ParameterPrefetch:
    """The gathers of one step, which run while the training thread goes on."""

    def __init__(self) -> None:
        self._completions: dict[int, Completion] = {}
        self._hooks: _ModuleHooks | None = None

    def begin(self, context: StageContext, gathers: Sequence[Gather], exchange: Exchange) -> None:
        """Launch ``gathers``, in this order, after all earlier work."""
        completions = {gather: Completion(context.device) for gather in gathers}
        for gather, completion in completions.items():
            self._completions.update((id(shard.parameter), completion) for shard in gather.shards)

        async def work(gather: Gather) -> None:
            await exchange.gather(gather.shards, context.group)
            completions[gather].set()

        def fail(error: BaseException) -> None:
            for completion in completions.values():
                completion.fail(error)

        assert context.background is not None, "the runtime gives it to every stage that it attaches"
        context.background(gathers, work, on_failure=fail)

    def wait(self) -> None:
        """Wait for all gathers."""
        completions, self._completions = self._completions, {}
        for completion in dict.fromkeys(completions.values()):
            completion.wait()

    def wait_for(self, parameters: Iterable[int]) -> None:
        """Wait for the gathers of some parameters, given by ``id``."""
        if self._completions:
            for completion in dict.fromkeys(map(self._completions.get, parameters)):
                if completion is not None:
                    completion.wait()

    def attach(self, context: StageContext, parameters: Collection[int]) -> None:
        """Have the model's modules wait. See [Note: who waits].

        Raises:
            ConfigurationError: the model is not known.
            UnsupportedError: a part of the model is compiled.
        """
        model = None if context.module is None else context.module()
        if model is None:
            raise ConfigurationError(
                "gather='forward' makes modules wait for their parameters, and a hook registered with "
                "ddp.register_comm_hook does not know the model: use overlap.register, or gather='backward'"
            )
        if any("_orig_mod" in name.split(".") for name, _ in model.named_modules()) or hasattr(model, "_orig_mod"):
            raise UnsupportedError("gather='forward' cannot hook into a compiled module; use gather='backward'")
        self._hooks = _ModuleHooks(model, set(parameters), self)

    def follow(self, parameters: Collection[int]) -> None:
        """Have the model's modules wait for these parameters from now on, all those of the optimizer."""
        if self._hooks is not None:
            self._hooks.follow(set(parameters))

    def detach(self) -> None:
        """Remove the hooks of the modules and wait for all gathers."""
        if self._hooks is not None:
            self._hooks.remove()
        self.wait()


class _ModuleHooks:
    def __init__(self, model: nn.Module, parameters: set[int], prefetch: ParameterPrefetch) -> None:
        self._prefetch = prefetch
        self._called: set[str] = set()
        self._needs: dict[str, tuple[int, ...]] = {}
        self._own: dict[str, tuple[int, ...]] = {}
        self._below: dict[str, tuple[int, ...]] = {}
        self._is_learned = False
        self._handles: list[Any] = []
        self._first: list[tuple[weakref.ref[nn.Module], Any]] = []
        self._model = weakref.ref(model)
        self.follow(parameters)
        for name, module in model.named_modules():
            # Before hooks that make the weight from others, as pruning and the old weight_norm do.
            hook = _Hook(partial(_before_forward, self, name))
            handle = module.register_forward_pre_hook(hook, prepend=True)
            self._first.append((weakref.ref(module), handle))
            self._handles += [handle, module.register_state_dict_pre_hook(_Hook(lambda module: prefetch.wait()))]

    def follow(self, parameters: set[int]) -> None:
        """Wait for these parameters from now on."""
        model = self._model()
        assert model is not None, "hooks run while the model is there"
        for name, module in model.named_modules(remove_duplicate=False):
            self._own[name] = tuple(id(p) for p in module.parameters(recurse=False) if id(p) in parameters)
            self._below[name] = tuple({id(p) for p in module.parameters()} & parameters)
        self._is_learned = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def before_forward(self, name: str, module: nn.Module) -> None:
        """Wait for the parameters that the forward of `module` reads."""
        if name == "":
            self._go_first()
        if not (module.training and torch.is_grad_enabled()):
            self._prefetch.wait_for(self._below[name])
            return
        if name == "":
            self._learn()
        self._called.add(name)
        self._prefetch.wait_for(self._needs.get(name, self._own[name]))

    def _go_first(self) -> None:
        """Run before hooks that were registered since, also if they were to be the first."""
        for reference, handle in self._first:
            if (module := reference()) is not None:
                move_to_front(module, handle)

    def _learn(self) -> None:
        """At the second forward: find which modules wait for those that the first forward did not call."""
        if self._is_learned or not self._called:
            return
        self._is_learned = True
        needs = {name: set(own) for name, own in self._own.items()}
        for name, own in self._own.items():
            above = name
            while above not in self._called and above:
                above = above.rpartition(".")[0]
            needs[above].update(own)
        self._needs = {name: tuple(keys) for name, keys in needs.items()}


class _Hook:
    """A module's hook that calls ``function`` with the module; does nothing in a copy of the module."""

    def __init__(self, function: Callable[[nn.Module], None] | None = None) -> None:
        self._function = function

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self._function is not None:
            self._function(module)

    def __reduce__(self) -> Any:
        return _Hook, ()


# A compiled forward does not include the wait.
_before_forward: Callable[..., None] = torch.compiler.disable(_ModuleHooks.before_forward)
