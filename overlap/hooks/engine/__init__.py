"""What drives stages: the order of collectives, the thread or stream that runs them, and DDP's hook.

Nothing here is needed to write a stage; see :mod:`overlap.hooks.stage` for that.
"""
