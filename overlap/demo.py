"""`python -m overlap demo`: ResNet-18 on handwritten digits, trained by plain DDP and by a chain, and compared.

With `--link` the ranks are joined by links of that speed, and a chain that compresses gradients is trained, too.

From top to bottom: the options and the ranks that they start, the data, the two trainings, the comparison, and the
report of rank 0. One file, since it is read as one script.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import itertools
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from tqdm import tqdm

from overlap import _link, chain
from overlap._checks import require_extra
from overlap.errors import ConfigurationError
from overlap.hooks import AllReduce, Quantize, Stage
from overlap.hooks.wires import Int4, Int8
from overlap.optim import OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep
from overlap.timeline.recording import clock_for

_RANKS = 2
# The process whose network namespace has the bridge between the ranks.
_BRIDGE = "OVERLAP_DEMO_BRIDGE"
# On each rank.
_BATCH_SIZE = 32
CHAINS = {
    "step": "the update in backward",
    "zero": "the sharded update in backward",
    "int8": "gradients travel in 8 bits",
    "int4": "gradients travel in 4 bits, with error feedback",
}
_EXACT = ("step", "zero")
# --link adds it to an exact chain.
_COMPRESSED = "int8"
_REDUCERS: dict[str, Callable[[], Stage]] = {
    "step": AllReduce,
    "int8": lambda: Quantize(Int8()),
    "int4": lambda: Quantize(Int4(), error_feedback=True),
}
_OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 2e-3, "weight_decay": 1e-2, "fused": True}),
}
# Four fifths of the 1,797 digits.
TRAIN_IMAGES = 1437
# With more ranks the order of summation is the backend's to choose.
_EXACT_RANKS = 2
_ACCURACY_SLACK = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `overlap demo`."""
    add = parser.add_argument
    # No default that argparse knows: under torchrun the ranks are those that it started.
    add("--ranks", type=_whole_number(1, 64), default=argparse.SUPPRESS,
        help=f"processes to start (default: {_RANKS}, or torchrun's)")  # fmt: skip
    add("--chain", choices=tuple(CHAINS), default="step",
        help="; ".join(f"{name}: {words}" for name, words in CHAINS.items()))  # fmt: skip
    add("--optimizer", choices=tuple(_OPTIMIZERS), default="sgd", help="sgd is with momentum, adamw fused")
    add("--epochs", type=_whole_number(1, 1000), default=5, help="passes over the training images")
    add("--seed", type=_whole_number(0, 2**31), default=0, help="of the weights and the images' order")
    add("--images", type=_whole_number(2, TRAIN_IMAGES), default=TRAIN_IMAGES, help="training images to use")
    add("--image-size", type=_whole_number(8, 224), default=32, help="side in pixels; the digits have 8")
    add("--link", default=argparse.SUPPRESS, metavar="SPEED",
        help="join the ranks by links of this speed, such as 1gbit (Linux, root), and compress, too")  # fmt: skip


def _whole_number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")

    return parse


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Starts the ranks, or is one of them: returns 0 if the two runs agree as far as they must."""
    require_extra("demo", "torchvision", "sklearn")
    asked = getattr(options, "ranks", None)
    launched = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
    if launched and asked not in (None, launched):
        raise ConfigurationError(f"--ranks is {asked}, but the launcher started {launched}: leave it out")
    ranks = launched or asked or _RANKS
    if options.images < _BATCH_SIZE * ranks:
        raise ConfigurationError(
            f"{options.images} images are not a batch of {_BATCH_SIZE} on each of {ranks} ranks: give "
            f"--images {_BATCH_SIZE * ranks} or more, or fewer --ranks"
        )
    link = getattr(options, "link", None)
    bytes_per_s = None if link is None else _link.parse_bandwidth(link)
    if not launched:
        return _start(argv, ranks, has_link=link is not None)
    report = train_and_compare(options, _join_group(bytes_per_s))
    is_main = dist.get_rank() == 0
    dist.destroy_process_group()
    return present(report, options) if is_main else 0


def _start(argv: Sequence[str], ranks: int, *, has_link: bool) -> int:
    """Runs `python -m overlap *argv` once per rank, by torchrun; returns the exit code of the first that fails."""
    if has_link:
        if (missing := _link.missing_requirement()) is not None:
            raise ConfigurationError(f"--link cannot shape the network between ranks: {missing}; leave it out")
        _link.open_bridge()
        os.environ[_BRIDGE] = str(os.getpid())
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # Warnings that addresses there have no names.
    print(f"Starting {ranks} ranks on this machine; the first step comes some seconds later.", flush=True)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    # Ranks share the cores: with the default of one thread per core each, they would compete for them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        main(["--standalone", "--nproc-per-node", str(ranks), "-m", "overlap", *argv])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return abs(failure.exitcode)
    return 0


def _join_group(bytes_per_s: float | None) -> torch.device:
    """Joins the default process group, of NCCL where every rank of the machine has a GPU and of Gloo elsewhere."""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if bytes_per_s is not None:
        if _BRIDGE not in os.environ:
            raise ConfigurationError("--link starts the ranks itself: leave the launcher out")
        _link.join_bridge(int(os.environ[_BRIDGE]), local_rank, bytes_per_s=bytes_per_s)
        os.environ.update({"MASTER_ADDR": _link.BRIDGE_ADDRESS, "GLOO_SOCKET_IFNAME": _link.INTERFACE})
    if bytes_per_s is not None or torch.cuda.device_count() < local_ranks:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    # Sums in NVLink switches differ from call to call, between two plain runs, too.
    os.environ.setdefault("NCCL_ALGO", "^NVLS")
    dist.init_process_group("nccl", device_id=chosen)
    return chosen


# The data: 1,797 handwritten digits of 8 x 8 pixels in 17 shades, which come with scikit-learn -----------------


@dataclass(frozen=True)
class Digits:
    """Images (N, 3, size, size) in float32 from -1 to 1, and labels (N,) in int64 from 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(*, image_size: int, images: int, device: torch.device) -> Digits:
    """Loads the digits onto a device, enlarged, with as many of each digit in the test split as its share."""
    from sklearn import datasets, model_selection

    pixels, labels = datasets.load_digits(return_X_y=True)
    # One split for every seed, so that the accuracies of runs can be compared.
    train_pixels, test_pixels, train_labels, test_labels = model_selection.train_test_split(
        pixels, labels, test_size=0.2, stratify=labels, random_state=0
    )

    def enlarged(pixels: object) -> Tensor:
        shades = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
        large = interpolate(shades, size=(image_size, image_size), mode="bilinear", align_corners=False)
        return large.repeat(1, 3, 1, 1).to(device)  # The model takes three colours.

    return Digits(
        train_images=enlarged(train_pixels[:images]),
        train_labels=torch.as_tensor(train_labels[:images]).to(device),
        test_images=enlarged(test_pixels),
        test_labels=torch.as_tensor(test_labels).to(device),
    )


def shard(
    digits: Digits, *, epoch: int, seed: int, rank: int, ranks: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """One rank's batches of an epoch: the same in every run, and every rank has as many."""
    order = torch.randperm(len(digits.train_labels), generator=torch.Generator().manual_seed(seed + epoch))
    for start in range(0, len(order) - batch_size * ranks + 1, batch_size * ranks):
        own = order[start + rank * batch_size :][:batch_size].to(digits.train_labels.device)
        yield digits.train_images[own], digits.train_labels[own]


@cache
def load_torchvision() -> ModuleType:
    """Imports torchvision, also beside a CPU-only torch.

    PyPI's torchvision is built for CUDA: beside a CPU-only torch its compiled operators cannot be loaded, and the
    import then fails because two of them are given Python implementations. Their names are all that is missing.
    """
    spec = importlib.util.find_spec("torchvision")
    library = next(Path(spec.origin).parent.glob("_C*.so"), None) if spec and spec.origin else None
    try:
        if library is not None:
            torch.ops.load_library(str(library))
    except OSError:
        for name in ("nms", "qnms"):
            _torchvision_operators().define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision")


@cache
def _torchvision_operators() -> torch.library.Library:
    """Kept by the cache: operators are removed when their library is garbage-collected."""
    return torch.library.Library("torchvision", "DEF")


# The trainings -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingRun:
    """One of the trainings, on one rank."""

    name: str
    # The work on a bucket: in words, or the chain's repr.
    chain: str
    ddp: DistributedDataParallel
    # The one that the training loop steps and the learning rate's schedule changes.
    optimizer: Optimizer
    scheduler: LRScheduler
    # From a step to the next, which counts everything that a step leaves running.
    steps_ms: list[float] = field(default_factory=list)

    def train_epoch(self, batches: Iterator[tuple[Tensor, Tensor]], progress: tqdm[None]) -> Tensor:
        """One pass over this rank's batches. Returns its loss of the last one, before the step."""
        clock = clock_for(next(self.ddp.parameters()).device)
        marks: list[Any] = []
        for images, labels in batches:
            marks.append(clock.now())
            self.optimizer.zero_grad()
            loss = cross_entropy(self.ddp(images), labels)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            progress.update()
        marks.append(clock.now())
        clock.settle()
        self.steps_ms.extend(clock.elapsed_ms(before, after) for before, after in itertools.pairwise(marks))
        return loss.detach()


def _steps_per_epoch(options: argparse.Namespace) -> int:
    """How many batches every rank gets; images that do not fill a batch on each are left out."""
    return int(options.images) // (_BATCH_SIZE * dist.get_world_size())


def start_runs(options: argparse.Namespace, device: torch.device) -> list[TrainingRun]:
    """The plain and the overlapped run, and with a link a compressed one, from the same weights."""
    torch.manual_seed(options.seed)
    # Convolutions that add in another order each time would differ between two plain runs, too.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    model = load_torchvision().models.resnet18(num_classes=10).to(device)
    make, arguments = _OPTIMIZERS[options.optimizer]

    def start(name: str, kind: str | None) -> TrainingRun:
        ddp = DistributedDataParallel(copy.deepcopy(model), device_ids=[device] if device.type == "cuda" else None)
        optimizer, description = make(ddp.parameters(), **arguments), "DDP, then the optimizer's step"
        if kind is not None:
            if kind == "zero":
                optimizer = ZeroRedundancyOptimizer(ddp.parameters(), make, **arguments)
                stages = chain(ZeroStep(optimizer))
            else:
                optimizer = OverlappedOptimizer(optimizer)
                stages = chain(_REDUCERS[kind](), Step(optimizer))
            stages.register(ddp)
            description = repr(stages)
        steps = options.epochs * _steps_per_epoch(options)
        schedule = OneCycleLR(optimizer, max_lr=arguments["lr"], total_steps=steps + 1, cycle_momentum=False)
        return TrainingRun(name, description, ddp, optimizer, schedule)

    kinds = {"plain DDP": None, "overlapped": options.chain}
    if "link" in options and options.chain in _EXACT:
        kinds["compressed"] = _COMPRESSED
    return [start(name, kind) for name, kind in kinds.items()]


def train_and_compare(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Trains the runs on every rank of the default group. Returns the results, which only rank 0 has whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    digits = load_digits(image_size=options.image_size, images=options.images, device=device)
    runs, steps = start_runs(options, device), _steps_per_epoch(options)
    if rank == 0:
        size = options.image_size
        print(
            f"ResNet-18 on {options.images} handwritten digits of {size}x{size} pixels, "
            f"optimizer {options.optimizer}\n"
            f"ranks: {ranks} on {device.type} ({dist.get_backend()}); epochs: {options.epochs} of {steps} steps; "
            f"batch: {_BATCH_SIZE} images a rank"
        )
        for run in runs:
            print(f"{run.name + ':':12}{run.chain}", flush=True)
    losses: dict[str, Tensor] = {}
    # A log file gets a line now and then, a terminal a bar that moves.
    interval_s = 0.2 if sys.stderr.isatty() else 15.0
    total = options.epochs * steps * len(runs)
    with tqdm(total=total, unit="step", disable=rank != 0, mininterval=interval_s) as progress:
        # In turns of an epoch, so that a change in the machine's load falls on both.
        for epoch, run in itertools.product(range(options.epochs), runs):
            progress.set_description(f"epoch {epoch + 1}/{options.epochs}, {run.name:10}", refresh=False)
            batches = shard(digits, epoch=epoch, seed=options.seed, rank=rank, ranks=ranks, batch_size=_BATCH_SIZE)
            losses[run.name] = run.train_epoch(batches, progress)
    for loss in losses.values():
        dist.all_reduce(loss)
    differences = _compare(*runs[:2])
    results: dict[str, dict[str, Any]] = {
        run.name: {
            "chain": run.chain,
            # DDP broadcasts the running statistics of rank 0, so its model is evaluated.
            "accuracy": accuracy(run, digits) if rank == 0 else 0.0,
            "step_ms": statistics.median(run.steps_ms),
            "loss": float(losses[run.name]) / ranks,
        }
        for run in runs
    }
    must_be_equal = options.chain in _EXACT and ranks <= _EXACT_RANKS
    slack = results["overlapped"]["accuracy"] - results["plain DDP"]["accuracy"]
    return {
        "runs": results,
        "largest_differences": differences,
        "must_be_equal": must_be_equal,
        "passed": not any(differences.values()) if must_be_equal else slack >= -_ACCURACY_SLACK,
    }


def accuracy(run: TrainingRun, digits: Digits) -> float:
    """The share of the test split that this rank's model gets right."""
    model = run.ddp.module.eval()
    with torch.no_grad():
        right = sum(
            int((model(images).argmax(dim=1) == labels).sum())
            for images, labels in zip(digits.test_images.split(90), digits.test_labels.split(90), strict=True)
        )
    return right / len(digits.test_labels)


# The comparison ------------------------------------------------------------------------------------------------


def _compare(first: TrainingRun, second: TrainingRun) -> dict[str, float]:
    differences = {
        "parameters": largest_difference(dict(first.ddp.named_parameters()), dict(second.ddp.named_parameters())),
        "optimizer state": largest_difference(_optimizer_state(first), _optimizer_state(second)),
        "buffers": largest_difference(dict(first.ddp.named_buffers()), dict(second.ddp.named_buffers())),
    }
    device = next(first.ddp.parameters()).device
    largest = torch.tensor(list(differences.values()), dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(differences, largest.tolist(), strict=True))


def _optimizer_state(run: TrainingRun) -> dict[str, Any]:
    if isinstance(run.optimizer, ZeroRedundancyOptimizer):
        run.optimizer.consolidate_state_dict(to=None)  # As the plain optimizer has it, on every rank.
    state = run.optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}


def largest_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """Over all entries; infinite where a value is not finite."""
    assert first.keys() == second.keys()
    pairs = [(torch.as_tensor(first[name]), torch.as_tensor(second[name])) for name in first]
    differences = [(one.detach().double() - other.detach().double()).abs().max() for one, other in pairs]
    return max(float(one.nan_to_num(nan=math.inf)) for one in differences)


# The report of rank 0 ------------------------------------------------------------------------------------------


def present(results: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Prints the results, and returns the exit code."""
    gain = f"\n{_gain(results['runs'], options.link)}" if "link" in options else ""
    print(f"\n{_table(results)}\n\n{_verdict(results, options)}{gain}", flush=True)
    return 0 if results["passed"] else 1


def _table(results: Mapping[str, Any]) -> str:
    runs, differences = results["runs"], results["largest_differences"]
    rows = [
        ("", *runs),
        ("accuracy on the test split", *(f"{run['accuracy']:.4f}" for run in runs.values())),
        ("loss at the last step", *(f"{run['loss']:.4f}" for run in runs.values())),
        ("step, median", *(f"{run['step_ms']:.1f} ms" for run in runs.values())),
        ("largest difference: parameters", "", f"{differences['parameters']:.3g}"),
        ("  optimizer state", "", f"{differences['optimizer state']:.3g}"),
        ("  buffers", "", f"{differences['buffers']:.3g}"),
    ]
    return "\n".join(f"{label:<32}{''.join(f'{cell:>12}' for cell in cells)}" for label, *cells in rows)


def _gain(runs: Mapping[str, Any], link: str) -> str:
    """One line: the gain of compressed gradients, those of the last run, on the link."""
    plain, last = runs["plain DDP"], [*runs.values()][-1]
    return (
        f"On links of {link} {last['chain']} takes {last['step_ms']:.0f} ms a step where plain DDP takes "
        f"{plain['step_ms']:.0f}: {plain['step_ms'] / last['step_ms']:.2f} times as fast, "
        f"{100 * (last['accuracy'] - plain['accuracy']):+.1f} points of accuracy."
    )


def _verdict(results: Mapping[str, Any], options: argparse.Namespace) -> str:
    if results["must_be_equal"]:
        if results["passed"]:
            return "Equal: parameters, optimizer state and buffers are the same in every bit."
        largest = max(results["largest_differences"].values())
        return f"NOT EQUAL: the largest difference is {largest:.3g}, and must be 0."
    reason = "these gradients are compressed, so that results differ"
    if options.chain in _EXACT:
        reason = f"above {_EXACT_RANKS} ranks the order of summation may differ"
    runs = results["runs"]
    points = 100 * (runs["overlapped"]["accuracy"] - runs["plain DDP"]["accuracy"])
    outcome = "Compared by accuracy" if results["passed"] else "LESS ACCURATE"
    return f"{outcome} ({reason}): {points:+.1f} points, -{100 * _ACCURACY_SLACK:.0f} is allowed."
