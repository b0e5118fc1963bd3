"""Runs stages: the order of collectives, the thread or stream of the stages' code, and the hook that DDP calls.

Nothing here is needed to write a stage; see :mod:`overlap.hooks.stage`. From the bottom up: ``channels`` and
``executors`` say where collectives and code run, ``wavefront`` runs the buckets of one pass and work between passes,
``runtime`` the passes of one model; ``registration`` connects a runtime to DDP.
"""
