"""What is to hold on a GPU, as functions that need torch and overlap alone; `make gpu` and `python -m gpu` run them.

check       what a check is, and what comes of it;  table: all of them
chains      every kind of chain, with the same training by hand where there is such a thing
training    the model and the loop;  lateness: streams made late on purpose
parity, races, sanitizer, host_waits, memory, times    the checks, by topic
runner      starts ranks and has them run checks

On the CPU, with Gloo, the same functions run where they can, so that what is left to a GPU is the GPU.
"""
