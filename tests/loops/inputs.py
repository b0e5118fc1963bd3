"""What ranks are given: even and uneven numbers of batches, other processes' work between."""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.functional import mse_loss

from overlap import Join

from .corpus import loop
from .models import ADAMW
from .plain import trained
from .run import Run


def joined(join: Any, *, is_even: bool) -> Any:
    """The usual loop under ``Join``, where rank 0 may have fewer batches."""

    def body(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
        joinables = [ddp, optimizer] if hasattr(optimizer, "join_hook") else [ddp]
        with join(joinables):
            for place, (x, y) in enumerate(run.batches()):
                if not is_even and run.rank == 0 and place >= 2:
                    run.compare_models_only()  # Plain, this rank's optimizer stops here.
                    break
                loss = trained(ddp, optimizer, x, y)
        yield loss

    return body


loop("Join with even inputs")(joined(Join, is_even=True))
loop("Join with uneven inputs", optimizer=ADAMW)(joined(Join, is_even=False))
loop("PyTorch's Join with uneven inputs")(joined(TorchJoin, is_even=False))


@loop("collectives of the user's between the passes")
def collectives(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        optimizer.step()
        dist.barrier()
        yield mean
