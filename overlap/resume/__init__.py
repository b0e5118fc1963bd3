"""All that one rank needs to resume as if its run had never been interrupted."""

from overlap.resume.state import load_state_dict, state_dict
from overlap.resume.train_state import TrainState

__all__ = ["TrainState", "load_state_dict", "state_dict"]
