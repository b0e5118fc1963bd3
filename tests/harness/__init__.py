"""Test harness: one helper starts ranks as processes, one asserts parity."""

from ._rank import UNKNOWN_BACKEND
from .parity import assert_equal_ranks, assert_parity
from .ranks import (
    RankDied,
    RankFailed,
    RankHung,
    WorldError,
    on_ranks,
    play,
    run_ranks,
    start_server,
)
from .train import Record, bucket_sizes_bytes, overlapped_step, plain_step, registered, train, wrap

__all__ = [
    "UNKNOWN_BACKEND",
    "RankDied",
    "RankFailed",
    "RankHung",
    "Record",
    "WorldError",
    "assert_equal_ranks",
    "assert_parity",
    "bucket_sizes_bytes",
    "on_ranks",
    "overlapped_step",
    "plain_step",
    "play",
    "registered",
    "run_ranks",
    "start_server",
    "train",
    "wrap",
]
