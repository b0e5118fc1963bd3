"""Stages that neither reduce nor update: they change or read gradients or parameters."""

from overlap.hooks.transforms.clip import ClipGradNorm
from overlap.hooks.transforms.divide_by_count import DivideByCount
from overlap.hooks.transforms.log import Log
from overlap.hooks.transforms.skip_non_finite import SkipNonFinite
from overlap.hooks.transforms.transform import Transform

__all__ = ["ClipGradNorm", "DivideByCount", "Log", "SkipNonFinite", "Transform"]
