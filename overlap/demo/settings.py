"""The options of the `demo` command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from overlap.errors import ConfigurationError

__all__ = ["CHAINS", "OPTIMIZERS", "TRAIN_IMAGES", "Settings"]

OPTIMIZERS = ("sgd", "adamw")
CHAINS = {
    "step": "the update in backward",
    "zero": "the sharded update in backward",
    "bf16": "gradients travel in bfloat16",
    "int8": "gradients travel in 8 bits",
    "int4": "gradients travel in 4 bits, with error feedback",
    "topk": "1 % of the gradients travels, with error feedback",
    "powersgd": "gradients travel as factors of rank 2",
    "zero-int8": "the sharded update, gradients and parameters in 8 bits",
    "zero-int4": "the sharded update, gradients in 4 bits and parameters in 8",
    "local-sgd": "after the first epoch parameters are averaged every 8 steps",
    "diloco": "the same, and an outer optimizer steps with the change",
    "diloco-int4": "the same, and changes travel in 4 bits",
}
# Four fifths of the 1,797 digits.
TRAIN_IMAGES = 1437
# BatchNorm has nothing to normalize with less.
_LEAST_BATCH = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one run, as given."""

    optimizer: str = "sgd"
    # One of CHAINS.
    chain: str = "step"
    epochs: int = 5
    # On each rank.
    batch_size: int = 32
    # Of the model's weights and of the order of the images.
    seed: int = 0
    # How many of the training images to use.
    images: int = TRAIN_IMAGES
    # Side of a square image, in pixels; the digits have 8.
    image_size: int = 32
    # Ranks get different numbers of batches, and both runs train under Join.
    uneven: bool = False
    device: str = "auto"
    output: Path = Path("overlap-demo")
    json: Path | None = None

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
