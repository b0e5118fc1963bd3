"""Gathers new parameters during the next forward, and makes code that reads them wait.

[Note: who waits]

A gather during the next forward writes parameters while the training thread goes on. Looking a parameter up in a module
of the registered model waits for that parameter: a forward, a hook or another module that reads
``module.weight``, and ``parameters()``, ``state_dict()``, ``load_state_dict()``, ``copy.deepcopy`` and ``pickle``.

Some modules keep their parameters in a second place, as recurrent ones do. So each module waits, before its forward,
for its own parameters, and a scripted one, whose parts are called where Python does not see it, for all below it.

Nothing else waits, such as a list of parameters that was made before: call ``zero.wait()``.

Where a gather has failed, each of them raises its error, until the parameters are loaded: the model's
``load_state_dict()`` only waits for those that it overwrites, and the optimizer's raises nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from overlap._torch.ddp import is_compiled, is_compiled_in_place
from overlap._torch.device import current_stream, hold
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks import StageContext
from overlap.hooks.engine.wavefront import Completion
from overlap.hooks.stage import Plan, follow
from overlap.optim.zero.exchange import BucketShards, Gather

_NOT_GATHERED = (
    "the new parameters were not gathered, so ranks have different ones: load a checkpoint by "
    "model.load_state_dict(...) on every rank before going on"
)


class ParameterPrefetch:
    """The gathers of one step, which run while the training thread goes on."""

    def __init__(self) -> None:
        self._completions: dict[int, Completion] = {}
        # Where the memory of parameters is, by their ``id`` and the stream that it is kept for.
        self._held: dict[tuple[int, Any], int] = {}
        self._model: weakref.ref[nn.Module] | None = None
        self._handles: list[Any] = []
        self._has_raised = False
        """Whether a failure was raised, which is there until parameters are loaded."""

    def begin(
        self, context: StageContext, gathers: Sequence[Gather], gathering: Callable[[BucketShards], Plan]
    ) -> None:
        """Launch ``gathers``, in this order, after all earlier work."""
        self._follow()

        async def work(gather: Gather) -> None:
            self._hold(gather, current_stream(context.device))
            await follow(gathering(gather.shards))

        assert context.background is not None, "the runtime gives it to every stage that it attaches"
        for gather, completion in context.background(gathers, work).items():
            for shard in gather.shards:
                self._completions[id(shard.parameter)] = completion

    def _hold(self, gather: Gather, stream: Any | None) -> None:
        """Keep the parameters' memory for ``stream``: if the model is dropped, nothing waits for the gather."""
        for shard in gather.shards if stream is not None else ():
            key, address = (id(shard.parameter), stream), shard.parameter.data_ptr()
            if self._held.get(key) != address:
                self._held[key] = address
                hold(shard.parameter, stream)

    def wait(self) -> None:
        """Wait for all gathers."""
        self.wait_for(self._completions)
        self._completions = {}

    def wait_quietly(self) -> None:
        """Wait for all gathers, whether or not they failed."""
        for completion in dict.fromkeys(self._completions.values()):
            with contextlib.suppress(Exception):
                completion.wait()

    def wait_for(self, parameters: Iterable[int]) -> None:
        """Wait for the gathers of some parameters, given by ``id``."""
        if self._completions:
            for completion in dict.fromkeys(map(self._completions.get, parameters)):
                if completion is not None:
                    try:
                        completion.wait()
                    except Exception as error:
                        self._has_raised = True
                        error.add_note(_NOT_GATHERED)
                        raise

    def _on_read(self, parameters: Iterable[Tensor | None]) -> None:
        if self._completions:
            self.wait_for(map(id, parameters))

    # The modules of the model. See [Note: who waits].

    def attach(self, context: StageContext) -> None:
        """Have readers of the model's parameters wait.

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
        for name, module in model.named_modules():
            if is_compiled(module):
                raise _is_compiled(name)
        self._model = weakref.ref(model)
        for name, module in model.named_modules():
            below = isinstance(module, torch.jit.ScriptModule)
            needed = tuple(map(id, module.parameters(recurse=below)))
            hook = _Hook(partial(self._before_forward, name, needed))
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
            self._handles.append(module.register_load_state_dict_pre_hook(_Hook(self._before_load)))
        self._follow()

    def detach(self) -> None:
        """Remove the hooks of the modules and wait for all gathers."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules():
            parameters = vars(module).get("_parameters")
            if isinstance(parameters, _Parameters) and parameters.on_read == self._on_read:
                vars(module)["_parameters"] = parameters.plain()
        self._model, self._handles = None, []
        self.wait_quietly()
        if self._has_raised:
            self._completions = {}
        try:
            self.wait()
        finally:
            self._completions, self._has_raised = {}, False

    def _modules(self) -> Iterable[nn.Module]:
        model = None if self._model is None else self._model()
        return () if model is None else model.modules()

    def _follow(self) -> None:
        """Have readers of the model's modules wait, also of those that it has got since."""
        for module in self._modules():
            parameters = vars(module).get("_parameters")  # A scripted module keeps them elsewhere.
            if isinstance(parameters, dict) and type(parameters) in (dict, OrderedDict):
                vars(module)["_parameters"] = _Parameters(parameters, self._on_read)

    def _before_load(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Wait for the parameters of ``module`` that get other values, whether or not their gathers failed."""
        parameters = module._parameters
        unread = parameters.plain() if isinstance(parameters, _Parameters) else parameters
        for name, parameter in unread.items():
            completion = self._completions.pop(id(parameter), None) if f"{prefix}{name}" in state_dict else None
            if completion is not None:
                with contextlib.suppress(Exception):
                    completion.wait()

    def _before_forward(self, name: str, needed: tuple[int, ...], module: nn.Module, *_: Any) -> None:
        """Wait for the parameters that the forward of ``module`` reads."""
        if is_compiled_in_place(module):
            raise _is_compiled(name)
        self.wait_for(needed)


def _is_compiled(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"gather='forward' cannot hook into a compiled module, and {name or 'the model'} is compiled; compile the "
        "DistributedDataParallel model, torch.compile(ddp), or use gather='backward'"
    )


class _Hook:
    """A module's hook that calls ``function``; does nothing in a copy of the module."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function
        _leave_untraced()

    def __call__(self, *arguments: Any) -> None:
        if self._function is not None:
            self._function(*arguments)

    def __reduce__(self) -> Any:
        return _Hook, ()


@cache
def _leave_untraced() -> None:
    """A compiled forward does not include the wait. Not at import, where the compiler would be imported, too."""
    _Hook.__call__ = torch.compiler.disable(_Hook.__call__)  # type: ignore[method-assign]


# Who reads parameters. Private: ``Module._parameters`` is the dict in which ``module.weight``, ``parameters()``,
# ``state_dict()``, ``_apply`` and copies look parameters up.

_OnRead = Callable[[Iterable[Tensor | None]], None]


class _Parameters(dict[str, Any]):
    """The parameters of a module, which calls ``on_read`` with those that are about to be read."""

    __slots__ = ("on_read",)

    def __init__(self, parameters: dict[str, Any], on_read: _OnRead) -> None:
        super().__init__(parameters)
        self.on_read = on_read

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.on_read((value,))
        return value

    def get(self, name: str, default: Any = None) -> Any:
        self.on_read((super().get(name),))
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.on_read((super().get(name),))
        return super().pop(name, *default)

    def values(self) -> Any:
        self.on_read(super().values())
        return super().values()

    def items(self) -> Any:
        self.on_read(super().values())
        return super().items()

    def __iter__(self) -> Iterator[str]:
        # Since this is overridden dict(parameters) and {**parameters} call __getitem__.
        return super().__iter__()

    def copy(self) -> dict[str, Any]:
        self.on_read(super().values())
        return self.plain()

    def plain(self) -> dict[str, Any]:
        """An ordinary dict of the same parameters, without a read."""
        return dict(super().items())

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)
