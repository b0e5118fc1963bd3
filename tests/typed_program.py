"""What type checkers see of a program that uses the library, for `make check`: an error that is missing is one, too."""

from collections.abc import Iterator
from typing import assert_type

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap import Join, checkpoint_wrapper, offload_wrapper


def loaders_keep_the_types_of_their_items(ddp: DistributedDataParallel, pairs: list[tuple[Tensor, int]]) -> None:
    with Join([ddp]) as join:
        assert_type(join.iterate(pairs), Iterator[tuple[Tensor, int]])
        for _, y in join.iterate(pairs):
            print(y.no_such_attribute)  # type: ignore[attr-defined]


def wrapped_modules_keep_their_types(layer: torch.nn.Linear) -> None:
    assert_type(checkpoint_wrapper(layer, offload_to_cpu=True), torch.nn.Linear)
    assert_type(offload_wrapper(layer).in_features, int)
    checkpoint_wrapper("layer")  # type: ignore[type-var]
