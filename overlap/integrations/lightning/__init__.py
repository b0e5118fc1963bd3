"""Lightning: ``Trainer(strategy=OverlapStrategy(chain=...))``."""

from overlap.integrations._extras import needs

with needs("lightning"):
    import lightning.pytorch as _lightning  # noqa: F401

from overlap.integrations.lightning.strategy import OverlapStrategy, register_names

register_names()

__all__ = ["OverlapStrategy"]
