"""Runs stages: the order of collectives, the thread or stream of the stages' code, and the hook that DDP calls.

Nothing here is needed to write a stage; see :mod:`overlap.hooks.stage`. From the bottom up: ``wavefront`` decides which
bucket advances next, ``task`` advances one bucket, ``executors`` and ``channels`` say where code and collectives run,
``backward_pass`` runs the buckets of one pass and ``runtime`` the passes of one model, ``registration`` connects
a runtime to DDP.
"""
