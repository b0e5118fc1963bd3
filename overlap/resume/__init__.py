"""All that one rank needs to go on as if its run had never been interrupted, in one object."""

from overlap.resume.rank_state import load_state_dict, state_dict
from overlap.resume.train_state import TrainState

__all__ = ["TrainState", "load_state_dict", "state_dict"]
