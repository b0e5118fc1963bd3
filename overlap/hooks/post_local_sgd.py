"""Averages gradients over all ranks at first, and later over a subgroup or not at all.

This is half of post-local SGD (Lin et al. 2018, https://arxiv.org/abs/1808.07217); the other half, averaging
parameters, is in :mod:`overlap.optim`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from overlap._checks import check_flag, check_group, check_whole_number, short_repr, type_name
from overlap._torch import classes
from overlap._torch.c10d import GradBucket
from overlap.errors import ConfigurationError
from overlap.hooks.adapters import StageHook, as_stage
from overlap.hooks.bucket import Bucket, on_group
from overlap.hooks.reducers import AllReduce
from overlap.hooks.stage import Stage, StageContext
from overlap.ranks.machines import group_of_machine

_logger = logging.getLogger(__name__)


class PostLocalSGDState(classes.PostLocalSGDState):
    """When gradients stop being averaged over all ranks, and over which ranks they are averaged from then on.

    Args:
        process_group: all ranks; where ``None`` the model's group (registered with DDP itself: the default group).
        subgroup: the ranks that go on averaging gradients; where ``None`` those of ``process_group`` that are on the
            same machine, in a group that is made when it is first needed.
        start_localSGD_iter: backward passes before that.
        post_local_gradient_allreduce: ``False`` averages no gradients from then on.

    Pickling leaves the process groups out: set them again, or leave them ``None``.

    Raises:
        ConfigurationError: ``start_localSGD_iter`` is below 0, or this rank is not in ``subgroup``.

    >>> state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=2)
    >>> registration = overlap.register(ddp, post_localSGD_hook, state)
    >>> loss_fn(ddp(x), y).backward()
    >>> state.is_local
    False
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,  # noqa: N803
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        start = check_whole_number("start_localSGD_iter", start_localSGD_iter, least=0)
        self.process_group = check_group("process_group", process_group)
        self.subgroup = check_group("subgroup", subgroup)
        self.start_localSGD_iter = start
        self.post_local_gradient_allreduce = check_flag("post_local_gradient_allreduce", post_local_gradient_allreduce)
        self.iter = 0
        """Backward passes so far, counted up to ``start_localSGD_iter``."""

    @property
    def is_local(self) -> bool:
        """Whether the next backward pass no longer averages over all ranks."""
        return self.iter >= self.start_localSGD_iter

    def maybe_increase_iter(self, bucket: Bucket | GradBucket) -> None:
        """Count a backward pass when its last bucket arrives."""
        is_last = bucket.is_last if isinstance(bucket, Bucket) else bucket.is_last()
        if is_last and not self.is_local:
            self.iter += 1

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None or self.subgroup is not None:
            _logger.warning("PostLocalSGDState: process groups are not pickled; set them after loading")
        return {**self.__dict__, "process_group": None, "subgroup": None}

    def group_of_pass(self) -> dist.ProcessGroup | None:
        """The ranks that the next local pass averages over; ``None`` if it averages nothing.

        Communication, the first time without a ``subgroup``: host names are compared through the store of
        ``process_group``, and each of its ranks makes the group of its machine.

        Raises:
            ConfigurationError: ``process_group`` lacks ranks of a job whose NCCL groups all ranks make together.
        """
        if not self.post_local_gradient_allreduce:
            return None
        if self.subgroup is None:
            own = self.process_group
            whole: dist.ProcessGroup = dist.group.WORLD if own is None else own  # type: ignore[assignment]
            self.subgroup = group_of_machine(whole)
        return self.subgroup


class PostLocal(Stage):
    """Reduces over all ranks until local SGD starts, and then over a subgroup or not at all.

    Args:
        state: when local SGD starts, and which ranks are the subgroup; several stages must not share one.
        inner: the reducer, :class:`AllReduce` where ``None``.

    Communication: that of ``inner``, on ``state.process_group`` (the model's where ``None``), then on the
    subgroup, or nothing.

    Raises:
        ConfigurationError: ``inner`` is not a reducer.

    >>> from overlap.hooks import PostLocal, PostLocalSGDState
    >>> PostLocal(PostLocalSGDState(None, None, start_localSGD_iter=1000))
    PostLocal(AllReduce(), from step 1000)
    """

    def __init__(self, state: PostLocalSGDState, inner: Stage | None = None) -> None:
        self._state = state
        self.inner = AllReduce() if inner is None else as_stage(inner)
        if not self.inner.reduces:
            raise ConfigurationError(f"PostLocal takes a reducer, and {self.inner!r} is not a reducer")
        self.children = (self.inner,)
        self._is_local = False
        self._group: dist.ProcessGroup | None = None
        self._replan: Callable[[], None] = lambda: None
        self._committed: int | None = None
        """Passes up to the last step, once one has begun since."""

    def attach(self, context: StageContext) -> None:
        self._committed, self._replan = None, context.replan

    def commit(self, *, others: Collection[str] = ()) -> None:
        self._committed = None

    def discard(self, *, found_inf: Tensor | None = None, others: Collection[str] = ()) -> None:
        if found_inf is None and self._committed is not None:
            self._state.iter, self._committed = self._committed, None

    def before_backward(self, *, is_replay: bool) -> None:
        self._committed = self._state.iter if self._committed is None else self._committed
        # Decided once for all buckets of the pass, and here, because making a group is a collective.
        before = self._is_local, self._group
        self._is_local = self._state.is_local
        self._group = self._state.group_of_pass() if self._is_local else self._state.process_group
        if before != (self._is_local, self._group):
            self._replan()  # Later stages get means of other ranks now, or none.

    async def __call__(self, bucket: Bucket) -> None:
        if self._group is not None:
            await self.inner(on_group(bucket, self._group))
        elif not self._is_local:
            await self.inner(bucket)
        self._state.maybe_increase_iter(bucket)

    def output_bucket(self, bucket: Bucket) -> Bucket:
        return replace(bucket, is_mean=self._group is not None or not self._is_local)

    def state_dict(self) -> dict[str, Any]:
        """That of ``inner``, and ``iter``."""
        return {**super().state_dict(), "iter": self._state.iter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned; without an ``iter``, ``state`` counts on from its own."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "iter"})
        self._state.iter, self._committed = state_dict.get("iter", self._state.iter), None

    @property
    def signature(self) -> str:
        return f"PostLocal({self.inner.signature}, from step {short_repr(self._state.start_localSGD_iter)})"

    def __repr__(self) -> str:
        return f"PostLocal({self.inner!r}, from step {short_repr(self._state.start_localSGD_iter)})"


def _checked(state: Any) -> PostLocalSGDState:
    if not isinstance(state, PostLocalSGDState):
        raise ConfigurationError(
            f"the state of post_localSGD_hook must be a PostLocalSGDState of overlap.hooks, got {type_name(state)}; "
            "make one, as in PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=1000)"
        )
    return state


post_localSGD_hook = StageHook(  # noqa: N816 (PyTorch's name)
    lambda state: PostLocal(_checked(state)),
    "post_localSGD_hook",
    group_of=lambda state: _checked(state).process_group,
    doc="""The mean over all ranks until local SGD starts, then over a subgroup; see :class:`PostLocal`.

    >>> state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=1000)
    >>> registration = overlap.register(ddp, post_localSGD_hook, state)
    >>> loss_fn(ddp(x), y).backward()
    """,
    module=__name__,
)
