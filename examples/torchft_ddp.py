"""Two replicas learn digits with PowerSGD; one is killed and comes back: python examples/torchft_ddp.py

It starts torchft's Lighthouse and both replicas on this machine. On several machines start the Lighthouse by
``torchft_lighthouse --min_replicas 1``, and on each ``TORCHFT_LIGHTHOUSE=http://...:29510 python train.py``.
"""

import argparse
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("RUST_LOG", "error")  # torchft is told before it is imported
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import overlap
from overlap.integrations.torchft import prepare

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=1000, help="at the least: training ends with both replicas")
parser.add_argument("--batch", type=int, default=64, help="images per replica and step")
parser.add_argument("--replica", help="be this one; without, start all")
options = parser.parse_args()


def train() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of this replica group's processes
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
        replica_id=f"replica-{options.replica}",
    )
    pixels, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp, optimizer = prepare(
        manager,
        model,
        torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9),
        chain=lambda optimizer: overlap.chain(overlap.PowerSGD(rank=2), overlap.Step(optimizer, deferred=True)),
    )
    while manager.current_step() < options.steps or manager.num_participants() < 2:
        optimizer.zero_grad()  # who is there; this replica gets the state of another if it is behind
        step, rank = manager.current_step(), manager.participating_rank()
        drawn = torch.randint(len(labels), (options.batch,), generator=torch.Generator().manual_seed(2 * step + rank))
        loss = cross_entropy(ddp(images[drawn]), labels[drawn])
        loss.backward()
        optimizer.step()  # if the step is committed
        if manager.current_step() == step:
            print(f"step {step} of {options.steps} was not committed", flush=True)
        elif manager.current_step() % 50 == 0:
            ranks = manager.num_participants()
            print(f"step {step + 1} of {options.steps}: replicas {ranks}, loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        whole = cross_entropy(model(images), labels).item()
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"loss of all images {whole:.4f}, parameters {hashlib.sha256(bits).hexdigest()[:16]}", flush=True)
    manager.shutdown(wait=False)


class Replica:
    """A process, whose lines are printed under its name; what torchft logs is in a file."""

    def __init__(self, name: str, folder: str, *, killed_at: str = "never") -> None:
        arguments = [sys.executable, __file__, *sys.argv[1:], "--replica", name]
        with Path(folder, f"replica-{name}.log").open("a") as log:
            self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=log, text=True)
        self.last, self._name, self._killed_at = "", name, killed_at
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.last = line.strip()
            print(f"[replica {self._name}] {self.last}", flush=True)
            if self.last.startswith(self._killed_at):
                self.process.kill()

    def join(self) -> int:
        self._reader.join()
        return self.process.wait()


def main() -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=2_000)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address().replace(socket.gethostname(), "localhost")
    folder = tempfile.mkdtemp(prefix="torchft-")
    print(f"logs are in {folder}", flush=True)
    first, second = Replica("0", folder), Replica("1", folder, killed_at="step 250 ")
    second.join()
    print("replica 1 was killed; it starts again", flush=True)
    second = Replica("1", folder)
    codes = first.join(), second.join()
    lighthouse.shutdown()
    same = codes == (0, 0) and first.last == second.last
    sys.exit(0 if same else f"the replicas differ: {first.last!r}, {second.last!r}")


if __name__ == "__main__":
    train() if options.replica else main()
