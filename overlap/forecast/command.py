"""`overlap plan`: the candidates' steps on a link and a number of ranks that are not here, by prediction alone."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overlap._options import require_extra, whole_number
from overlap.bench.link import parse_bandwidth
from overlap.bench.settings import MODELS, OPTIMIZERS
from overlap.errors import ConfigurationError
from overlap.plan.candidates import ALLOW, Candidate
from overlap.plan.decision import Options
from overlap.plan.dry import measured_costs
from overlap.plan.link import Link
from overlap.plan.plan import Plan
from overlap.plan.predict import ranking
from overlap.plan.profile import Profile
from overlap.plan.request import allowed_candidates

__all__ = ["add_arguments", "run"]

_MOST_RANKS = 2**20
_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="resnet18", help="what to measure on this machine")
    parser.add_argument("--batch-size", type=whole_number(1, 2**20), default=8, help="of each rank")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw-fused")
    parser.add_argument("--profile", metavar="FILE", help="measure no computation: take it from this file")
    parser.add_argument("--save-profile", metavar="FILE", help="save what was measured, for --profile")
    parser.add_argument("--ranks", type=whole_number(2, _MOST_RANKS), default=2)
    parser.add_argument("--bandwidth", metavar="SPEED", default="10gbit", help="of each rank's link, e.g. 25gbit")
    parser.add_argument("--latency", metavar="TIME", default="30us", help="of a message, e.g. 30us")
    parser.add_argument("--algorithm", choices=("ring", "tree"), default="ring", help="of collectives")
    parser.add_argument("--allow", metavar="KIND,KIND,...", default=",".join(ALLOW),
                        help="what may be chosen; the table shows no others")  # fmt: skip
    parser.add_argument("--memory", metavar="small|BYTES", help="choose among what takes less, or at most so much")
    parser.add_argument("--json", metavar="FILE", help="save the plan")
    parser.add_argument("--plot", metavar="FILE.png", help="save a picture")


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    if options.plot is not None:
        require_extra("bench", "matplotlib")
    for name in ("save_profile", "json", "plot"):
        path = getattr(options, name)
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise ConfigurationError(f"{name}={path!r} lies in a folder that does not exist: create it first")
    link = Link.on_paper(
        ranks=options.ranks,
        bandwidth_bytes_per_s=parse_bandwidth(options.bandwidth),
        latency_s=parse_latency(options.latency),
        algorithm=options.algorithm,
    )
    memory = _memory(options.memory)
    candidates = allowed_candidates(options.allow.split(","))
    profile = _profile(options) if options.profile is None else Profile.load(options.profile)
    if options.save_profile is not None:
        profile.save(options.save_profile)
    plan = on_paper(profile, link, candidates, memory=memory)
    print(plan)
    print("Predicted, not measured: the computation is this profile's, the link is on paper.")
    if options.json is not None:
        plan.save(options.json)
    if options.plot is not None:
        from overlap.plan.picture import save_plan

        save_plan(plan, options.plot)
    return 0


def on_paper(profile: Profile, link: Link, candidates: Sequence[Candidate], *, memory: str | int | None = None) -> Plan:
    """The plan for a link that is not here; compressors are measured on this machine."""
    found = ranking(candidates, profile, link, measured_costs(link.ranks))
    options = Options.of(found, memory=memory, obstacles={})
    told = f"{profile.in_words()} ({profile.where})"
    return options.decide({}, {}, ranks=link.ranks, compute=told, link=link.where, seconds=0.0)


def parse_latency(text: str) -> float:
    """Seconds that ``text`` stands for.

    >>> parse_latency("30us"), parse_latency("1.5ms")
    (3e-05, 0.0015)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|ms|us|ns)", text.strip().lower())
    if match is None:
        raise ConfigurationError(f"latency={text!r} is not a time: write for example 30us or 1ms")
    return float(match[1]) * _UNITS_S[match[2]]


def _memory(text: str | None) -> str | int | None:
    if text is None or text == "small":
        return text
    if not text.isdigit():
        raise ConfigurationError(f"memory={text!r} is not 'small' or a number of bytes")
    return int(text)


def _profile(options: argparse.Namespace) -> Profile:
    import torch

    from overlap.bench.training_setup import LEARNING_RATE
    from overlap.bench.workload import workload
    from overlap.plan.compute import measure, thread_rate
    from overlap.plan.copies import Training

    torch.manual_seed(0)
    work = workload(options.model)
    model = work.make_model()
    sample = work.make_batch(options.batch_size)
    kind: Any = torch.optim.SGD if options.optimizer.startswith("sgd") else torch.optim.AdamW
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=LEARNING_RATE, fused=options.optimizer.endswith("fused") or None, **more)
    training = Training(model, optimizer, torch.nn.functional.cross_entropy)
    return measure(training, sample, seconds=_SECONDS, threads=thread_rate(1))
