"""All that one rank needs to go on as if its run had never been interrupted, and checkpoints of it that are whole."""

from overlap.resume.checkpoint_manager import CheckpointManager
from overlap.resume.rank_state import load_state_dict, state_dict
from overlap.resume.train_state import TrainState

__all__ = ["CheckpointManager", "TrainState", "load_state_dict", "state_dict"]
