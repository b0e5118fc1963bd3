"""PowerSGD: gradients sent as factors of low rank.

``algorithm`` is the arithmetic of one bucket, as in the paper. ``memory`` lasts from step to step and is saved.
``stage`` has :class:`PowerSGD`, ``torch_names`` PyTorch's names.
"""

from overlap.hooks.powersgd.stage import PowerSGD
from overlap.hooks.powersgd.torch_names import PowerSGDState, powerSGD_hook

__all__ = ["PowerSGD", "PowerSGDState", "powerSGD_hook"]
