"""How many operators the package issues for a bucket: on an accelerator about as many kernels and collectives.

As the code for accelerators issues them, with streams that do nothing and a fake process group; views are left out.
"""

import pytest

from benchmarks.host_cost import METHODS, PLAIN, operators
from overlap.optim.zero import exchange

# At most so many for a bucket of six parameters; lower a figure when a stage comes to need fewer.
MOST_A_BUCKET = {
    PLAIN: 0,
    "AllReduce": 2,
    "DivideByCount, AllReduce": 2,  # It divides in place of the reducer.
    "Cast(bfloat16)": 4,
    "AllReduce, Log": 3,
    "route, AllReduce": 8,  # Of each half: packed, divided, reduced, copied back.
    "AllReduce, Step": 4,
    "AllReduce, Step, deferred": 2,
    "AllReduce, Step, released": 4,
    "AllReduce, ClipGradNorm, Step": 4,
    "AllReduce, SkipNonFinite, Step": 6,
    "ZeroStep, 8 ranks": 9,
    "ZeroStep, 64 ranks": 10,  # Of some parameters the last ranks own less, so they are unpacked by a copy more.
    "ZeroStep, in forward": 9,
    "PowerSGD(rank=4)": 40,
    "Quantize(Int8()), 8 ranks": 19,
    "Quantize(Int8()), 64 ranks": 19,
    "Quantize(Int4()), feedback": 37,
}
# And so many in a step, however many buckets there are.
MOST_A_STEP = {
    "DivideByCount, AllReduce": 7,
    "AllReduce, Step, deferred": 2,
    "AllReduce, ClipGradNorm, Step": 8,
    "AllReduce, SkipNonFinite, Step": 9,
    "Quantize(Int4()), feedback": 4,
    "PowerSGD(rank=4)": 4,
}


@pytest.mark.parametrize("method", METHODS)
def test_a_bucket_and_a_step_take_few_operators(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_LEAST_BYTES_ON_STREAMS", 2**24)  # Tests of streams cut gathers into small parts.
    four, eight = operators(method, 4), operators(method, 8)
    a_bucket = (eight.total() - four.total()) / 4
    assert a_bucket >= 2 or method == PLAIN  # A collective and the division: they were seen.
    assert a_bucket <= MOST_A_BUCKET[method], {name: (count - four[name]) / 4 for name, count in eight.items()}
    assert four.total() - 4 * a_bucket <= MOST_A_STEP.get(method, 0), four
