"""Ray Train, with a chain on the model that Ray has wrapped: python examples/frameworks/ray_train.py"""

import argparse

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="without overlap: it learns the same")
parser.add_argument("--steps", type=int, default=6)


def train(config: dict) -> None:
    from overlap import AllReduce, OverlappedOptimizer, Step, chain

    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    model = prepare_model(net, parallel_strategy_kwargs={"bucket_cap_mb": 0.002})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not config["plain"]:
        optimizer = OverlappedOptimizer(optimizer)
        chain(AllReduce(), Step(optimizer)).register(model)

    generator = torch.Generator().manual_seed(rank)
    for _ in range(config["steps"]):
        loss = cross_entropy(
            model(torch.randn(8, 16, generator=generator)), torch.randint(4, (8,), generator=generator)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = sum(parameter.double().abs().sum() for parameter in model.parameters()).item()
    print(f"rank {rank}: loss {loss.item():.9f}, weights {total:.12f}", flush=True)


if __name__ == "__main__":
    config = vars(parser.parse_args())
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2)).fit()
