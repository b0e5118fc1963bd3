"""Random training programs: a model, a chain, a loop, and what the documentation promises of them beside plain DDP."""

from __future__ import annotations

import random
from typing import Any

from .networks import BLOCKS
from .program import LR, Program, Promise
from .vocabulary import (
    AFTER,
    BOUNDS,
    BY_ALIGNMENT_IN_BF16,
    FACTORS,
    FORMS,
    HALF_OF,
    LOCAL,
    MEAN,
    NOT_ALWAYS_USED,
    OPTIMIZERS,
    PARTITIONS,
    REAL_OPTIMIZERS,
    REDUCERS,
    ROUNDED_FORMS,
    SCHEDULERS,
    WITH_MEMORY,
    ZERO,
)

__all__ = ["draw"]


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    return _rounded(rng, seed) if rng.random() < 0.35 else _exact(rng, seed)


def _model(rng: random.Random, *, is_rounded: bool) -> dict[str, Any]:
    left_out = {"bfloat16", "complex", *NOT_ALWAYS_USED} if is_rounded else set()
    rare = {"complex", "in turns", "in turns by rank", "unused"}
    names = [name for name in BLOCKS for _ in range(1 if name in rare else 2) if name not in left_out]
    blocks = tuple(rng.choice(names) for _ in range(rng.randint(1, 5)))
    fronts = ["features", "features", "images", "tokens", *([] if is_rounded else ["channels last"])]
    dtype = "float32" if is_rounded else rng.choice(("float32", "float32", "float32", "float64", "bfloat16"))
    return {
        "front": "sparse tokens" if rng.random() < 0.02 and not is_rounded else rng.choice(fronts),
        "blocks": blocks,
        "dtype": dtype,
    }


def _ddp(rng: random.Random, blocks: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {"bucket_cap_mb": rng.choice((1 / 1024, 1 / 1024, 4 / 1024, 25))}
    may_be_static = not {"in turns", "in turns by rank"} & set(blocks)
    if may_be_static and rng.random() < 0.12:
        options["static_graph"] = True
    elif set(NOT_ALWAYS_USED) & set(blocks) or rng.random() < 0.1:
        options["find_unused_parameters"] = True
    if rng.random() < 0.4:
        options["gradient_as_bucket_view"] = True
    if rng.random() < 0.1:
        options["broadcast_buffers"] = False
    return options


def _update(form: str, rng: random.Random, optimizers: list[tuple[str, str]]) -> dict[str, Any]:
    """What makes the update of ``form``: optimizers of the loop, and stages."""
    plain = [f"{name}(p[{place}], {options})" for place, (name, options) in enumerate(optimizers)]
    zeros = [
        ZERO.format(place=place, name=name, options=options, more=rng.choice(PARTITIONS))
        for place, (name, options) in enumerate(optimizers)
    ]
    wrapped = [f"OverlappedOptimizer({one})" for one in plain]
    loose: dict[str, tuple[list[str], list[str]]] = {
        "interleaved": (wrapped, ["Step(o[0])"]),
        "deferred": (wrapped, ["Step(o[0], deferred=True)"]),
        "clipped": (wrapped, ["Step(o[0], clip_grad_norm=0.1)"]),
        "automatic": (plain, ["Step(o[0])"]),
        "automatic deferred": (plain, ["Step(o[0], deferred=True)"]),
        "released": (wrapped, ["Step(o[0], release_gradients=True)"]),
        "zero": (zeros, ["ZeroStep(o[0])"]),
        "zero forward": (zeros, ["ZeroStep(o[0], gather='forward')"]),
        "zero deferred": (zeros, ["ZeroStep(o[0], deferred=True)"]),
        "zero clipped": (zeros, ["ZeroStep(o[0], clip_grad_norm=0.1)"]),
        "zero released": (zeros, ["ZeroStep(o[0], release_gradients=True)"]),
        "zero automatic": (zeros, ["ZeroStep(o[0], automatic=True)"]),
        "two steps": (wrapped, ["Step(o[0])", rng.choice(("Step(o[1])", "Step(o[1], deferred=True)"))]),
        "two zeros": (zeros, ["ZeroStep(o[0])", "ZeroStep(o[1])"]),
        "zero and step": ([*zeros[:1], *wrapped[1:]], ["ZeroStep(o[0])", "Step(o[1])"]),
        "no update": (plain, []),
        "averaged": (wrapped, ["Step(o[0])", "Average(PeriodicModelAverager(2))"]),
    }
    made, stages = loose[form]
    return {"plain": tuple(plain), "made": tuple(made), "updates": stages}


def _exact(rng: random.Random, seed: int) -> Program:
    model = _model(rng, is_rounded=False)
    ddp = _ddp(rng, model["blocks"])
    form = rng.choice(FORMS)
    count = 2 if form in ("two steps", "two zeros", "zero and step") else 1
    is_complex = "complex" in model["blocks"]
    fitting = OPTIMIZERS if is_complex else REAL_OPTIMIZERS
    if "bfloat16" in (model["dtype"], *model["blocks"]):
        fitting = tuple(one for one in fitting if one != BY_ALIGNMENT_IN_BF16)
    optimizers = [rng.choice(fitting) for _ in range(count)]
    everything = rng.choice(("everything(ddp)", "everything(ddp)", "groups(ddp)"))
    parameters = ("matrices(ddp)", "others(ddp)") if count == 2 else (everything,)
    if count == 2 and not is_complex and rng.random() < 0.3:
        optimizers[0], parameters = ("torch.optim.Muon", "lr=0.02"), ("hidden(ddp)", "but_hidden(ddp)")
    if "released" in form:
        ddp["gradient_as_bucket_view"] = True
    common: dict[str, Any] = {
        **model,
        "seed": seed,
        "ddp": ddp,
        "parameters": parameters,
        "steps": rng.randint(3, 5),
        "micro_batches": 1 if "static_graph" in ddp else rng.choice((1, 1, 1, 2, 3)),
        "zero_grad": rng.choice(("before", "after", "to zero", "model", "left out")),
        "scheduler": rng.choice(SCHEDULERS),
        "is_inline": rng.random() < 0.4,
    }
    if form == "hook":
        ddp.pop("static_graph", None)  # Of several dtypes, a hook that DDP calls cannot tell the last bucket.
    if form in ("hook", "local"):
        return _without_chain(form, common, optimizers[0], rng)
    update = _update(form, rng, optimizers)
    updates = update.pop("updates")
    is_automatic = "automatic" in form
    may_lack_reducer = updates and updates[0].startswith("ZeroStep")
    reducer = "" if may_lack_reducer and rng.random() < 0.7 else rng.choice(REDUCERS)
    local = _some(rng, LOCAL, (0, 0, 0, 1), is_complex=is_complex) if reducer else ()
    # Before a ZeroStep that reduces by itself a function has each rank's own gradients.
    of_mean = MEAN if reducer else tuple(text for text in MEAN if not text.startswith("clip_value"))
    mean = _some(rng, of_mean, (0, 0, 0, 1, 1, 2), is_complex=is_complex)
    after = _some(rng, AFTER, (0, 0, 0, 1), is_complex=is_complex) if updates and form != "averaged" else ()
    by_hand = (*mean, "ClipGradNorm(0.1)") if "clipped" in form else mean
    clips = ""
    if form in ("interleaved", "deferred", "no update") and rng.random() < 0.15:
        clips = rng.choice(("clip_grad_norm_(ddp.parameters(), 0.1)", "clip_grad_value_(ddp.parameters(), 0.02)"))
    is_stepped = not is_automatic
    # A ZeroStep that reduces by itself takes what is linear before it, on each rank's own gradients.
    is_resummed = any(one == "centralize" for one in mean) and not reducer
    is_norm = any(one == "ClipGradNorm(0.1)" for one in by_hand)
    # Ranks add up their parts; parameters that no rank used are zeros; a clip in step() is in the optimizer's order.
    is_sharded = any("Zero" in stage for stage in updates)
    adds_otherwise = (
        is_sharded or "find_unused_parameters" in ddp or (form == "clipped" and everything == "groups(ddp)")
    )
    is_summed = is_resummed or (is_norm and adds_otherwise)
    if is_summed:  # Others may turn the last bit of a gradient near zero into a step.
        update = _update(form, rng, [OPTIMIZERS[1]] * count)
        updates = update.pop("updates")
    return Program(
        **common,
        **update,
        stages=(*local, *([reducer] if reducer else []), *mean, *updates, *after),
        local=local,
        mean=by_hand,
        after=after,
        is_stepped=is_stepped,
        clips=clips,
        has_closure=is_stepped and count == 1 and common["micro_batches"] == 1 and not clips and rng.random() < 0.1,
        spoils=rng.randrange(1, 3) if "SkipNonFinite()" in mean and rng.random() < 0.7 else -1,
        promise=Promise("summed" if is_summed else "exact"),
    )


def _some(rng: random.Random, texts: tuple[str, ...], counts: tuple[int, ...], *, is_complex: bool) -> tuple[str, ...]:
    """Some of the transforms; of complex numbers plain PyTorch clips no values."""
    fitting = [text for text in texts if not (is_complex and text.startswith(("clip_value", "centralize", "clamp")))]
    return tuple(rng.sample(fitting, rng.choice(counts)))


def _without_chain(form: str, common: dict[str, Any], optimizer: tuple[str, str], rng: random.Random) -> Program:
    name, options = optimizer
    plain = f"{name}(p[0], {options})"
    if form == "hook":
        made = f"hooked(ddp, {plain})"
        return Program(**common, plain=(plain,), made=(made,), is_stepped=False)
    period = rng.choice((0, 1, 2, 3))
    start = "start_step=10**6" if period == 0 else f"period={period}, start_step=0"
    # Each rank's own statistics would be averaged, too.
    blocks = tuple(block for block in common["blocks"] if "norm" not in block or period == 0)
    front = common["front"] if period == 0 else "features"
    return Program(
        **{**common, "blocks": blocks or ("linear",), "front": front},
        plain=(plain,),
        made=(f"LocalSGD(ddp, {plain}, {start})",),
        averages=period,
    )


def _rounded(rng: random.Random, seed: int) -> Program:
    model = _model(rng, is_rounded=True)
    ddp = _ddp(rng, model["blocks"])
    form = rng.choice(ROUNDED_FORMS)
    if "released" in form:
        ddp["gradient_as_bucket_view"] = True
    update = _update(form, rng, [("torch.optim.SGD", f"lr={LR}")])
    updates = update.pop("updates")
    kind = rng.choice(("bound", "bound", "nothing lost", "nothing lost", "factors", "wires"))
    if kind == "wires" and "zero" not in form:
        kind = "bound"
    promise, reducer = Promise(kind), ""
    if kind == "bound":
        reducer = rng.choice(sorted(BOUNDS))
        promise = Promise("bound", BOUNDS[reducer])
    elif kind == "nothing lost":
        reducer = rng.choice(WITH_MEMORY)
    elif kind == "factors":
        reducer = rng.choice(FACTORS)
    else:
        promise, updates = _wired(rng, updates)
    mean = tuple(rng.sample(("look", "Log(lambda step, norms: None)"), rng.choice((0, 0, 1))))
    return Program(
        **model,
        **update,
        seed=seed,
        ddp=ddp,
        stages=(*([reducer] if reducer else []), *mean, *updates),
        is_stepped=form != "automatic",
        steps=rng.randint(3, 6),
        micro_batches=1 if "static_graph" in ddp else rng.choice((1, 1, 2)),
        zero_grad=rng.choice(("before", "after", "to zero", "model")),
        is_inline=rng.random() < 0.4,
        promise=promise,
    )


def _wired(rng: random.Random, updates: list[str]) -> tuple[Promise, list[str]]:
    """A sharded update whose gradients, parameters or both travel through wires."""
    reduce, gather = rng.choice((("Int4()", ""), ("", "Int8()"), ("Int4()", "Int8()"), ("Float8()", "BFloat16()")))
    has_memory = bool(reduce) and rng.random() < 0.5
    options = [f"reduce_wire={reduce}"] * bool(reduce) + [f"gather_wire={gather}"] * bool(gather)
    text = ", ".join([*options, *["error_feedback=True"] * has_memory])
    error = 1.1 * HALF_OF[reduce] if reduce else 0.0
    promise = Promise("nothing lost" if has_memory else "bound", error, HALF_OF[gather] if gather else 0.0)
    return promise, [updates[0].removesuffix(")") + f", {text})"]
