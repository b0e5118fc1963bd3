"""Runs stages: the order of collectives, the thread or stream of the stages' code, and the hook that DDP calls.

Nothing here is needed to write a stage; see :mod:`overlap.hooks.stage`. From the bottom up: ``channels`` and
``executors`` say where collectives and code run, ``wavefront`` runs the buckets of one pass and work between passes,
``runtime`` the passes of one model; ``registration`` connects a runtime to DDP.

The way of a bucket: DDP calls the hook that ``register`` gave it, on autograd's thread, which calls
``Runtime.on_bucket``. The first bucket of a backward begins a ``BackwardPass``, and each has a ``Task``: the plans or
the coroutines of the chain's stages, one after another. The executor runs tasks on a worker thread, on autograd's own
or on a side stream. There the ``Wavefront`` advances a task to its first collective when it arrives, by one more with
each later bucket, and after the last one until it is done: an update runs when the *next* bucket arrives. DDP waits for
the bucket's future, or for all stages by one join, before it sets ``.grad``; after that the runtime notifies the
stages, and ``backward()`` raises the error of a pass that failed.

What is kept, and where: of a registration ``Runtime`` (stages, executor, channels), of each of DDP's buckets
``runtime._KnownBucket`` (its parameters) and ``runtime._KeptBucket`` (its task with the plans), of a pass
``BackwardPass`` (divisor, error, whether it is plain), of a bucket in a pass ``Bucket``. See [Note: plans].
"""
