"""Lightning: ``Trainer(strategy=OverlapStrategy(chain=...))``."""

from overlap.integrations._extras import needs

with needs("lightning"):
    import lightning.pytorch as _lightning  # noqa: F401

from overlap.integrations.lightning.strategy import OverlapStrategy

__all__ = ["OverlapStrategy"]
