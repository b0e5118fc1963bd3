"""What random programs are made of, as texts."""

from __future__ import annotations

__all__ = [
    "AFTER",
    "BOUNDS",
    "FACTORS",
    "FORMS",
    "HALF_OF",
    "LOCAL",
    "MEAN",
    "NOT_ALWAYS_USED",
    "OPTIMIZERS",
    "PARTITIONS",
    "REAL_OPTIMIZERS",
    "REDUCERS",
    "ROUNDED_FORMS",
    "SCHEDULERS",
    "BY_ALIGNMENT_IN_BF16",
    "WITH_MEMORY",
    "ZERO",
]

OPTIMIZERS = (
    ("torch.optim.SGD", "lr=0.05"),
    ("torch.optim.SGD", "lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01"),
    ("torch.optim.SGD", "lr=0.05, momentum=0.9, foreach=True, maximize=True"),
    ("torch.optim.AdamW", "lr=0.01"),
    ("torch.optim.AdamW", "lr=0.01, weight_decay=0.1, amsgrad=True, foreach=True"),
    ("torch.optim.Adam", "lr=torch.tensor(0.01)"),
)
# On a CPU the last bits of its momentum depend on where the gradient lies in memory, with plain DDP, too (torch 2.13).
BY_ALIGNMENT_IN_BF16 = ("torch.optim.SGD", "lr=0.05, momentum=0.9, fused=True")
REAL_OPTIMIZERS = (
    *OPTIMIZERS,
    BY_ALIGNMENT_IN_BF16,
    ("torch.optim.AdamW", "lr=0.01, fused=True"),
    ("torch.optim.Adamax", "lr=0.01"),
    ("torch.optim.NAdam", "lr=0.01"),
    ("torch.optim.RAdam", "lr=0.01"),
    ("torch.optim.RMSprop", "lr=0.01, momentum=0.5, centered=True"),
    ("torch.optim.Adagrad", "lr=0.05"),
    ("torch.optim.Adadelta", "lr=0.5"),
    ("torch.optim.Adafactor", "lr=0.01"),
    ("torch.optim.Rprop", "lr=0.01"),
    ("torch.optim.ASGD", "lr=0.05"),
    ("Lion", "lr=0.01, weight_decay=0.1"),
    ("LAMB", "lr=0.01"),
    ("BlockwiseAdamW", "lr=0.01"),
    ("SGLD", "lr=0.1"),
)
SCHEDULERS = (
    "",
    "torch.optim.lr_scheduler.StepLR({}, step_size=1, gamma=0.5)",
    "torch.optim.lr_scheduler.LambdaLR({}, lambda step: 1 / (1 + step))",
    "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts({}, T_0=2)",
)
REDUCERS = (
    "AllReduce()",
    "AllReduce()",
    "AllGather()",
    "route({by_ndim(least=2): AllReduce(), '*': AllReduce()})",
    "Hierarchical(machine_size=1)",
    "Hierarchical(machine_size=2)",
    "PowerSGD(start_step=1000)",
    "allreduce_hook",
    "as_stage(default_hooks.allreduce_hook)",
    "Cast(torch.float64)",
    "mean_by_hand",
)
LOCAL = ("scale(0.5)", "clip_value(0.05)", "centralize", "look")
MEAN = (
    "scale(0.5)", "clip_value(0.02)", "ClipGradNorm(0.1)", "ClipGradNorm(0.1, float('inf'))", "centralize",
    "SkipNonFinite()", "Log(lambda step, norms: None)", "look",
)  # fmt: skip
AFTER = ("clamp", "shrink", "look")
NOT_ALWAYS_USED = ("unused", "in turns", "in turns by rank")

ZERO = "ZeroRedundancyOptimizer(p[{place}], {name}, {options}, overlap_with_ddp=True{more})"
PARTITIONS = ("", "", ", partition='parameter'", ", partition='element'")

FORMS = (
    "interleaved", "deferred", "clipped", "automatic", "automatic deferred", "released", "hook", "zero", "zero forward",
    "zero deferred", "zero clipped", "zero released", "zero automatic", "two steps", "two zeros", "zero and step",
    "no update", "local", "averaged",
)  # fmt: skip

HALF_OF = {"Int8()": 1 / 254, "Int4()": 1 / 14, "Float8()": 1 / 16, "BFloat16()": 2**-8, "Float16()": 2**-11}
# By text: the error of the mean as a part of the largest gradient, on two ranks, with what casts around it add.
BOUNDS = {
    **{f"Quantize({wire})": 2.2 * error for wire, error in HALF_OF.items()},
    "Quantize(bits=4, chunk=64)": 2.2 / 14,
    "Quantize(Int4(rounding='stochastic'))": 4.5 / 14,
    "Quantize(TopK(1.0))": 2.2 * 2**-8,
    "Quantize(TopK(0.25))": 3.0,
    "Cast(torch.bfloat16)": 3 * 2**-8,
    "Cast(Float16())": 3 * 2**-11,
    "Cast(torch.bfloat16, Quantize(Int8()))": 2.2 / 254 + 3 * 2**-8,
    "bf16_compress_hook": 3 * 2**-8,
    "GatherQuantized(64)": 1.1 / 255,
    "quantization_pertensor_hook": 1.1 / 255,
    "Hierarchical(outer=Quantize(Int4()), machine_size=1)": 2.2 / 14,
    "Hierarchical(inner=Cast(torch.bfloat16), machine_size=2)": 5 * 2**-8,
    "route({by_ndim(least=2): Quantize(Int4()), '*': Cast(torch.bfloat16)})": 2.2 / 14,
    "route({by_ndim(least=2): AllReduce(), '*': Quantize(Int8())})": 2.2 / 254,
}
WITH_MEMORY = (
    "Quantize(Int4(), error_feedback=True)",
    "Quantize(TopK(0.25), error_feedback=True)",
    "Quantize(Int4(rounding='stochastic'), error_feedback=True)",
    "PowerSGD(rank=1, min_compression_rate=1)",
    "PowerSGD(rank=2, min_compression_rate=1, alternate=True)",
    "route({'head.*': PowerSGD(rank=1), '*': PowerSGD(rank=2, start_step=1, warm_start=False)})",
    "PowerSGD(rank=1, min_compression_rate=1, wire=Int8())",
)
FACTORS = (
    "PowerSGD(rank=1, error_feedback=False, min_compression_rate=1)",
    "PowerSGD(rank=2, error_feedback=False, min_compression_rate=1, alternate=True)",
)
ROUNDED_FORMS = (
    "interleaved", "deferred", "automatic", "released", "zero", "zero forward", "zero deferred",
    "zero released", "no update",
)  # fmt: skip
