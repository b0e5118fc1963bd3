"""PowerSGD: gradients sent as factors of low rank.

``reducer`` is the stage. ``algorithm`` is the arithmetic of one bucket, as in the paper; it multiplies ``matrices``,
orthogonalizes by ``orthogonalize`` and starts from ``bases``. ``layout`` says, from shapes alone, what is compressed
and where factors lie. ``memory`` lasts from step to step, ``checkpoint`` saves it.
``torch_names`` has PyTorch's names for all this, with ``whole_bucket`` for its batched hook.
"""

from overlap.hooks.powersgd.config import PowerSGDConfig
from overlap.hooks.powersgd.reducer import PowerSGD
from overlap.hooks.powersgd.torch_names import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

__all__ = ["PowerSGD", "PowerSGDConfig", "PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
