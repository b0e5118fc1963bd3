"""All that the ranks of a run need to resume as if it had never been interrupted."""

from overlap.resume.folder import load, save
from overlap.resume.state import load_state_dict, state_dict
from overlap.resume.train_state import TrainState

__all__ = ["TrainState", "load", "load_state_dict", "save", "state_dict"]
