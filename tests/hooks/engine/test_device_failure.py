"""On a device the host does not wait for collectives; a failure is told to the other ranks all the same."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks, wrap
from harness.communicators import HostStreams, on_simulated_device
from harness.models import MLP
from overlap import (
    AllReduce,
    Bucket,
    CollectiveError,
    Join,
    OverlappedOptimizer,
    PeerError,
    Stage,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap._torch import communicators
from overlap._torch.c10d import issued
from overlap.hooks import all_gather, all_reduce, broadcast, reduce_scatter, send_recv
from overlap.hooks.engine.background import Item, run_now
from overlap.hooks.engine.device_channels import DeviceChannels
from overlap.hooks.engine.executors import StreamExecutor
from overlap.join.failures import FailureStore

from ..failing import Flaky, backward, mean_gradients_are_right

TOLD_S = 2.0


def _watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "overlap-watch"]


def _gone(found: Any) -> bool:
    deadline_s = time.monotonic() + 3
    while found():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def _raises_on_one_rank(rank: int, world_size: int, failing: int, after: bool) -> None:
    with on_simulated_device() as device:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        registered = chain(Flaky(2, 1, after=after, enabled=rank == failing)).register(ddp)
        for step in range(2):
            mean_gradients_are_right(ddp, step, rank, is_exact=False)
        start_s = time.monotonic()
        if rank == failing:
            with pytest.raises(ValueError, match="the dog ate it"):
                backward(ddp, 2, rank)
        else:
            with pytest.raises(PeerError, match=f"rank {failing}: ValueError: the dog ate it .*bucket 1.*checkpoint"):
                backward(ddp, 2, rank)
        assert time.monotonic() - start_s < TOLD_S + 1
        assert _gone(lambda: device.log.count("abort") < 1) and device.log.count("abort") == 1
        for step in range(3, 6):
            mean_gradients_are_right(ddp, step, rank, is_exact=False)
        assert device.log.count("make") == 2 and device.log.count("abort") == 1
        registered.remove()
        assert _gone(_watches) and device.log.count("shutdown") == 1


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("after", [False, True], ids=["before its collective", "after it"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_raises_alone_is_named_on_the_others(world_size: int, failing: int, after: bool) -> None:
    run_ranks(_raises_on_one_rank, world_size, failing, after, group_timeout_s=15)


class _Exchange(Stage):
    """The mean by another collective for each bucket."""

    async def __call__(self, bucket: Bucket) -> None:
        size, rank, group = bucket.group.size(), bucket.group.rank(), bucket.group
        flat = bucket.buffer
        kind = bucket.index % 4
        if kind == 0:
            parts = torch.empty(size * flat.numel())
            await all_gather(parts, flat)
            flat.copy_(parts.view(size, -1).sum(0))
        elif kind == 1:
            padded = torch.zeros(size * -(-flat.numel() // size))
            padded[: flat.numel()] = flat
            chunk = torch.empty(padded.numel() // size)
            await reduce_scatter(chunk, padded)
            await all_gather(padded, chunk)
            flat.copy_(padded[: flat.numel()])
        elif kind == 2:
            others = [peer for peer in range(size) if peer != rank]
            received = [torch.empty_like(flat) for _ in others]
            await send_recv([(flat, peer) for peer in others], list(zip(received, others, strict=True)))
            flat.copy_(sum(received, flat.clone()))
        else:
            await all_reduce(flat, group=group)
            await broadcast(flat, src=size - 1)
        flat.div_(bucket.divisor)


def _every_collective(rank: int, world_size: int) -> None:
    with on_simulated_device() as device:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        chain(_Exchange()).register(ddp)
        for step in range(4):
            mean_gradients_are_right(ddp, step, rank, is_exact=False)
    assert {"allgather", "reduce_scatter", "messages", "allreduce", "broadcast"} <= set(device.log)
    assert device.log.count("make") == 1


def test_every_collective_runs_on_a_communicator_of_the_stages_own() -> None:
    run_ranks(_every_collective, 2)


def _buffers(rank: int, world_size: int) -> None:
    with on_simulated_device() as device:
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        chain(ZeroStep(zero, gather="forward")).register(ddp)
        before: int | None = None
        for step in range(6):
            if step == 3:  # By then DDP has rebuilt its buckets.
                before = issued(ddp.process_group)
            ddp(torch.randn(5, 4)).sum().backward()
            zero.step()
        after = issued(ddp.process_group)
    assert before is not None and after is not None
    dtypes = 2  # Of the buffers, which DDP broadcasts once a forward.
    assert after - before == 3 * dtypes, "nothing else runs there"
    assert "broadcast" not in device.log and "allgather" in device.log


def test_ddps_buffers_stay_on_the_groups_own_communicator() -> None:
    run_ranks(_buffers, 2)


class _Both(Stage):
    """Reduces over the model's group and over another one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    async def __call__(self, bucket: Bucket) -> None:
        await all_reduce(bucket.buffer)
        await all_reduce(bucket.buffer, group=self.group)
        bucket.buffer.div_(bucket.divisor * self.group.size())


def _named_groups(rank: int, world_size: int) -> None:
    with on_simulated_device() as device:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        registered = chain(_Both(pairs[rank // 2])).register(ddp)
        assert device.log == [], "a communicator takes the device's memory, so it is made when it is used"
        for step in range(2):
            mean_gradients_are_right(ddp, step, rank, is_exact=False)
        assert [made.size() for made in device.made] == [4, 2]
        registered.remove()
        assert _gone(_watches) and device.log.count("shutdown") == 2


def test_each_group_that_stages_name_has_its_communicator() -> None:
    run_ranks(_named_groups, 4)


class _Counts(Flaky):
    """Notes what is in flight when the buckets have gone back."""

    log: list[str]
    in_flight = -1

    def after_backward(self, *, failed: bool) -> None:
        if failed:
            self.in_flight = self.log.count("allreduce") - self.log.count("waited for allreduce")


def _waits_for_what_is_in_flight(rank: int, world_size: int) -> None:
    with on_simulated_device() as device:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        stage = _Counts(2, 1, after=False)
        stage.log = device.log
        chain(stage).register(ddp)
        for step in range(2):
            backward(ddp, step, rank)
        launched = device.log.count("allreduce")
        with pytest.raises(ValueError, match="the dog ate it"):
            backward(ddp, 2, rank)
        assert device.log.count("allreduce") == launched + 1, "bucket 0 is in flight when bucket 1 raises"
        assert stage.in_flight == 0
        assert device.log.index("abort") > len(device.log) - 1 - device.log[::-1].index("waited for allreduce")


def test_buckets_go_back_behind_what_is_in_flight() -> None:
    run_ranks(_waits_for_what_is_in_flight, 2)


def _error_between_passes(rank: int, world_size: int) -> None:
    with on_simulated_device() as device:
        group = dist.group.WORLD
        assert group is not None
        channels = DeviceChannels(group, torch.device("cpu"))
        executor = StreamExecutor(channels, torch.device("cpu"))

        async def work(item: Item) -> None:
            if item.index == 1:
                raise ValueError("the dog ate it")
            await all_reduce(torch.ones(3))

        with pytest.raises(ValueError, match="the dog ate it"):
            run_now([Item(index=index) for index in range(3)], work, executor)
        assert device.log == ["make", "allreduce", "waited for allreduce"]
        channels.close()
        assert _gone(_watches)


def test_work_between_passes_that_raises_leaves_nothing_in_flight() -> None:
    run_ranks(_error_between_passes, 2)


def _fails_while_gathers_ride(rank: int, world_size: int) -> None:
    """Rank 0 fails in its hook; rank 1 has gathers of the step before in flight, and a forward to come."""
    with on_simulated_device():
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01, overlap_with_ddp=True)
        registered = chain(Flaky(2, 0, after=False, enabled=rank == 0), ZeroStep(zero, gather="forward")).register(ddp)
        caught: list[BaseException] = []
        for step in range(6):
            try:
                backward(ddp, step, rank)
                zero.step()
            except Exception as error:
                caught.append(error)
        assert [type(error) for error in caught] == [ValueError if rank == 0 else PeerError]
        registered.remove()


def test_gathers_that_ride_into_forward_are_ended_too() -> None:
    run_ranks(_fails_while_gathers_ride, 2)


def _models_own_error(rank: int, world_size: int) -> None:
    with on_simulated_device():
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        chain(AllReduce()).register(ddp)
        for step in range(2):
            backward(ddp, step, rank)

        def fail(gradient: torch.Tensor) -> None:
            raise KeyError("in the model")

        if rank == 0:
            handle = next(iter(ddp.parameters())).register_hook(fail)
            with pytest.raises(KeyError):
                backward(ddp, 2, rank)
            handle.remove()
        else:
            with pytest.raises(PeerError, match="rank 0: AbandonedBackwardError"):
                backward(ddp, 2, rank)
        for step in range(3, 5):
            mean_gradients_are_right(ddp, step, rank, is_exact=False)


def test_an_error_of_the_models_own_in_backward_is_told() -> None:
    run_ranks(_models_own_error, 2)


def _between_steps(rank: int, world_size: int, is_after_step: bool) -> None:
    """A failure that is told while this rank is outside of backward is raised by what comes next, once."""
    with on_simulated_device():
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.01))
        registered = chain(AllReduce(), Step(optimizer, deferred=True)).register(ddp)
        batch = MLP.batch(0, rank)
        ddp(*batch.inputs).square().sum().backward()
        if is_after_step:
            optimizer.step()
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        if rank == 0:
            registered.runtime.executors.channels.fail(ValueError("the dog ate it"))
            optimizer.zero_grad()
        else:
            time.sleep(TOLD_S)
            with pytest.raises(PeerError, match="rank 0: ValueError: the dog ate it"):
                ddp(*batch.inputs) if is_after_step else optimizer.step()
        assert all(map(torch.equal, ddp.parameters(), before))
        ddp(*batch.inputs).square().sum().backward()
        optimizer.step()
        assert not any(map(torch.equal, ddp.parameters(), before))


@pytest.mark.parametrize("is_after_step", [True, False], ids=["forward", "step()"])
def test_what_comes_next_raises_what_was_told_outside_of_backward(is_after_step: bool) -> None:
    run_ranks(_between_steps, 2, is_after_step)


def _fails_under_join(rank: int, world_size: int) -> None:
    with on_simulated_device():
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.01))
        chain(AllReduce(), Step(optimizer)).register(ddp)
        with pytest.raises(ValueError if rank == 0 else PeerError, match="the dog ate it"):
            _joined_loop(ddp, optimizer, rank)


def _joined_loop(ddp: Any, optimizer: OverlappedOptimizer, rank: int) -> None:
    with Join([ddp, optimizer]) as join:
        for step, batch in enumerate(join.iterate([MLP.batch(step, rank) for step in range(8 - rank)])):
            if rank == 0 and step == 3:
                raise ValueError("the dog ate it")
            ddp(*batch.inputs).square().sum().backward()
            optimizer.step()


def test_an_error_of_the_loop_under_join_is_told() -> None:
    run_ranks(_fails_under_join, 2, group_timeout_s=8)


def _device_does_not_get_on(rank: int, world_size: int) -> None:
    class Stuck(HostStreams):
        def new_event(self, device: torch.device, *, is_timed: bool) -> Any:
            event = super().new_event(device, is_timed=is_timed)
            event.query = lambda: False
            return event

    with on_simulated_device(Stuck()) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators, "_STALLED_S", 1.0)
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        chain(AllReduce()).register(ddp)
        backward(ddp, 0, rank)
        if rank == 0:
            device.failure = "remote process exited"
            time.sleep(2.5)
            with pytest.raises(CollectiveError, match=r"no rank reported an error of its own.*remote process exited"):
                backward(ddp, 1, rank)
        else:
            time.sleep(4.5)  # The group's timeout is 3 s.
            with pytest.raises(CollectiveError, match=r"(not done after|rank 0: CollectiveError)"):
                backward(ddp, 1, rank)


def test_a_device_that_does_not_get_on_is_an_error_and_no_hang() -> None:
    run_ranks(_device_does_not_get_on, 2, group_timeout_s=3)


def _long_launch(rank: int, world_size: int) -> None:
    """A launch that waits for a rank that does not come is ended by the abort."""
    with on_simulated_device() as device:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        registered = chain(AllReduce()).register(ddp)
        for step in range(2):
            backward(ddp, step, rank)
        dist.barrier()
        if rank == 0:
            registered.runtime.executors.channels.fail(ValueError("the dog ate it"))
            return
        device.made[0].allreduce = device.made[0].wait_for_abort
        with pytest.raises(PeerError, match="the dog ate it"):
            backward(ddp, 2, rank)


def test_a_launch_that_waits_for_a_failed_rank_is_ended() -> None:
    run_ranks(_long_launch, 2)


def _goes_with_the_model(rank: int, world_size: int) -> None:
    with on_simulated_device() as device:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        chain(AllReduce()).register(ddp)
        backward(ddp, 0, rank)
        assert len(_watches()) == 1
        del ddp
        gc.collect()
        assert _gone(_watches) and device.log.count("shutdown") == 1
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        chain(AllReduce()).register(ddp)
        backward(ddp, 0, rank)
        dist.destroy_process_group()
        assert _gone(_watches) and device.log.count("shutdown") == 2
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # The harness destroys it.


def test_the_thread_that_looks_ends_with_the_model_or_the_group() -> None:
    run_ranks(_goes_with_the_model, 2)


def _asks_the_store_from_its_own_thread_alone(rank: int, world_size: int) -> None:
    with on_simulated_device(), pytest.MonkeyPatch.context() as patch:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.01))
        chain(AllReduce(), Step(optimizer)).register(ddp)
        askers: list[str] = []
        look = FailureStore.look
        for step in range(6):
            if step == 3:
                patch.setattr(FailureStore, "look", lambda self: (askers.append(_thread()), look(self))[1])
                patch.setattr(FailureStore, "first", lambda self: askers.append(_thread()))
                patch.setattr(communicators, "group_store", lambda group: askers.append(_thread()))
            ddp(*MLP.batch(step, rank).inputs).square().sum().backward()
            optimizer.step()
        time.sleep(1.2)
    assert set(askers) == {"overlap-watch"}


def _thread() -> str:
    return threading.current_thread().name


def test_a_healthy_step_asks_the_store_for_nothing() -> None:
    run_ranks(_asks_the_store_from_its_own_thread_alone, 2)


def _stays_on_the_group(rank: int, world_size: int) -> None:
    with on_simulated_device() as device:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        chain(AllReduce()).register(ddp, own_communicators=False)
        for step in range(2):
            mean_gradients_are_right(ddp, step, rank, is_exact=False)
        assert device.log == [] and not _watches()


def test_stages_can_stay_on_the_groups_own_communicator() -> None:
    run_ranks(_stays_on_the_group, 2)
