"""What type checkers see of a program that uses the library, for `make check`: an error that is missing is one, too."""

from collections.abc import Iterator
from typing import assert_type

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap import Join


def loaders_keep_the_types_of_their_items(ddp: DistributedDataParallel, pairs: list[tuple[Tensor, int]]) -> None:
    with Join([ddp]) as join:
        assert_type(join.iterate(pairs), Iterator[tuple[Tensor, int]])
        for _, y in join.iterate(pairs):
            print(y.no_such_attribute)  # type: ignore[attr-defined]
