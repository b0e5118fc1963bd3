"""What moments in 8 bits cost: accuracy of the demo's ResNet-18 on handwritten digits, and step times.

    python benchmarks/state_accuracy.py [--seeds 3] [--epochs 5]

Both train in one process from the same weights, on the same batches of 64, with the demo's schedule. Accuracy is of the
360 images that were held out. The times are of `optimizer.step()` alone on one thread: processor time of all
11.2 million parameters, the optimizers in turn, medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from overlap._torchvision import load_torchvision
from overlap.demo.data import Digits, load_digits, shard
from overlap.demo.settings import Settings
from overlap.optim import AdamW8bit

OPTIONS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 1e-2}
OPTIMIZERS: dict[str, Any] = {
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW8bit": AdamW8bit,
    "AdamW8bit, blocks of 2048": partial(AdamW8bit, block_numel=2048),
}
TRAINED = ("AdamW, fused", "AdamW8bit", "AdamW8bit, blocks of 2048")


def trained(model: nn.Module, make: Any, digits: Digits, *, seed: int, epochs: int) -> tuple[float, float]:
    """The accuracy in percent, and the mean loss of the last ten steps."""
    optimizer = make(model.parameters(), **OPTIONS)
    steps = epochs * (len(digits.train_labels) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=OPTIONS["lr"], total_steps=steps)
    losses = []
    for epoch in range(epochs):
        for images, labels in shard(digits, epoch=epoch, seed=seed, rank=0, ranks=1, batch_size=64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        right = (model(digits.test_images).argmax(1) == digits.test_labels).float().mean()
    return 100 * float(right), statistics.mean(losses[-10:])


def step_times_ms(model: nn.Module, *, steps: int = 15) -> dict[str, float]:
    """Processor time of a step of each optimizer, in ms."""
    times: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    made = {}
    for name, make in OPTIMIZERS.items():
        parameters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 0.01
        made[name] = make(parameters, **OPTIONS)
        made[name].step()
    for _ in range(steps):
        for name, optimizer in made.items():
            start_s = time.process_time()
            optimizer.step()
            times[name].append((time.process_time() - start_s) * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    digits = load_digits(image_size=32, images=Settings().images, device=torch.device("cpu"))
    build = load_torchvision().models.resnet18
    for name, time_ms in step_times_ms(build(num_classes=10)).items():
        print(f"{name}: {time_ms:.1f} ms a step", flush=True)
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        model = build(num_classes=10)
        for name in TRAINED:
            accuracy, loss = trained(copy.deepcopy(model), OPTIMIZERS[name], digits, seed=seed, epochs=options.epochs)
            print(f"seed {seed}, {name}: {accuracy:.1f} %, loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
