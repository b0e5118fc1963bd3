"""PowerSGD: gradients sent as factors of low rank.

``algorithm`` is the arithmetic of one bucket, as in the paper. ``layout`` has the matrices of a bucket and where their
factors are stored. ``memory`` lasts from step to step and is saved. ``stage`` has :class:`PowerSGD`, ``config`` its
options, ``torch_names`` PyTorch's names for all this.
"""

from overlap.hooks.powersgd.config import PowerSGDConfig
from overlap.hooks.powersgd.stage import PowerSGD
from overlap.hooks.powersgd.torch_names import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

__all__ = ["PowerSGD", "PowerSGDConfig", "PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
