"""Runs stages: the order of collectives, the thread or stream of the stages' code, and the hook that DDP calls.

Nothing here is needed to write a stage; see :mod:`overlap.hooks.stage`. From the bottom up: ``executors`` and
``channels`` say where code and collectives run, ``task`` advances one bucket, ``wavefront`` decides which bucket
advances next, ``backward_pass`` runs the buckets of one pass and ``runtime`` the passes of one model, ``registration``
connects a runtime to DDP.
"""
