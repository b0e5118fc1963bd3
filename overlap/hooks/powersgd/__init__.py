"""PowerSGD: gradients sent as factors of low rank.

``config`` says what is wanted, ``plan`` what becomes of each gradient (pure, from shapes), ``round`` is the
algorithm of one bucket; it multiplies ``operands``, makes bases by ``orthogonalize`` and starts from
``factors``. ``memory`` lasts from step to step, ``checkpoint`` saves it. ``stage`` puts it all behind one
call a bucket, ``torch_names`` behind PyTorch's.
"""

from overlap.hooks.powersgd.config import PowerSGDConfig
from overlap.hooks.powersgd.stage import PowerSGD
from overlap.hooks.powersgd.torch_names import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

__all__ = ["PowerSGD", "PowerSGDConfig", "PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
