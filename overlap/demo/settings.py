"""The options of the `demo` command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from overlap.errors import ConfigurationError

__all__ = ["OPTIMIZERS", "POWERSGD_ADAMW_EPOCHS", "RANKS", "TRAIN_IMAGES", "WIRES", "Settings"]

OPTIMIZERS = ("sgd", "adamw")
WIRES = ("fp16", "bf16", "fp8", "int8", "int4", "topk")
# Four fifths of the 1,797 digits.
TRAIN_IMAGES = 1437
RANKS = 2
# BatchNorm has nothing to normalize with less.
_LEAST_BATCH = 2
# The part of a gradient that factors leave out reaches the weights some steps later, and stays in AdamW's averages: in
# 5 epochs of 22 steps that still shows. SGD goes without momentum.
POWERSGD_ADAMW_EPOCHS = 10


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one run, as given."""

    optimizer: str = "sgd"
    epochs: int = 5
    # On each rank.
    batch_size: int = 32
    # Of the model's weights and of the order of the images.
    seed: int = 0
    # How many of the training images to use.
    images: int = TRAIN_IMAGES
    # Side of a square image, in pixels; the digits have 8.
    image_size: int = 32
    # Gradients travel in bfloat16: half the bytes, and no longer the same result.
    bf16_gradients: bool = False
    # Each rank has its share of the optimizer's state and makes its share of the update.
    zero: bool = False
    # Gradients travel as factors of this rank from the first step on; not at all where None.
    powersgd: int | None = None
    # How values travel, one of WIRES: gradients; with zero also the parameters, with local_sgd the averages instead.
    wire: str | None = None
    # Steps from one average of the parameters to the next; gradients are averaged at every step where None.
    local_sgd: int | None = None
    # An outer optimizer steps with the change of a round of local SGD, as in DiLoCo.
    diloco: bool = False
    # Ranks get different numbers of batches, and both runs train under Join.
    uneven: bool = False
    device: str = "auto"
    output: Path = Path("overlap-demo")
    json: Path | None = None

    def __post_init__(self) -> None:
        given = {
            "--bf16-gradients": self.bf16_gradients,
            "--powersgd": self.powersgd is not None,
            "--wire": self.wire is not None,
        }
        ways = [name for name, is_given in given.items() if is_given]
        if len(ways) > 1:
            raise ConfigurationError(f"{' and '.join(ways)} are ways to send gradients: give one of them")
        if self.diloco and self.local_sgd is None:
            raise ConfigurationError("--diloco is a form of local SGD: give --local-sgd PERIOD, too")
        if self.zero and self.local_sgd is not None:
            raise ConfigurationError(
                "--zero shares out one update, and with --local-sgd each rank makes its own: give one"
            )

    def steps_per_epoch(self, ranks: int) -> int:
        """How many batches every rank gets; images that do not fill a batch on each are left out.

        Raises:
            ConfigurationError: there is not one batch for every rank.
        """
        if self.images < _LEAST_BATCH * ranks:
            raise ConfigurationError(
                f"{self.images} images are too few for {ranks} ranks: give --images {_LEAST_BATCH * ranks} or more"
            )
        if self.images < self.batch_size * ranks:
            raise ConfigurationError(
                f"--batch-size {self.batch_size} on {ranks} ranks is more than the {self.images} images: "
                f"give --batch-size {_LEAST_BATCH} to {self.images // ranks}"
            )
        return self.images // (self.batch_size * ranks)

    def steps_of_rank(self, rank: int, ranks: int) -> int:
        """How many batches one rank gets: where they are ``uneven``, each rank fewer than the one before."""
        steps = self.steps_per_epoch(ranks)
        fewer = max(1, steps // (2 * ranks)) if self.uneven else 0
        return max(0, steps - rank * fewer)
