"""The rows of the benchmark, PyTorch's own beside ours. To add one, write its `@variant` function in a module here.

Each function takes a `TrainingSetup` and returns a `TrainingLoop`. What fails to import, build or run becomes a row
whose status says so, so nothing here checks whether a backend can do what is asked of it.

plain           DDP as everyone uses it, and the computation alone
updates         the update in backward, also sharded
compression     gradients in fewer bytes
averaging       parameters averaged now and then
uneven_inputs   Join
"""
