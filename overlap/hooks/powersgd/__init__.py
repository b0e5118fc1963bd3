"""PowerSGD: gradients sent as factors of low rank.

``algorithm`` is the arithmetic of one bucket, as in the paper. ``layout`` turns a bucket into matrices and says where
factors lie. ``memory`` lasts from step to step and is saved. ``stage`` has :class:`PowerSGD` and its options,
``torch_names`` PyTorch's names for all this.
"""

from overlap.hooks.powersgd.stage import PowerSGD, PowerSGDConfig
from overlap.hooks.powersgd.torch_names import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

__all__ = ["PowerSGD", "PowerSGDConfig", "PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
