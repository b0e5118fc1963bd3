"""All that one rank needs to resume as if its run had never been interrupted, and complete checkpoints of it."""

from overlap.resume.checkpoint_manager import CheckpointManager
from overlap.resume.rank_state import load_state_dict, state_dict
from overlap.resume.train_state import TrainState

__all__ = ["CheckpointManager", "TrainState", "load_state_dict", "state_dict"]
