"""What is to hold on a GPU, as functions that need torch and overlap alone; `make gpu` and `python -m gpu` run them.

checks      the scenarios of `tests/streams` that are played, and by topic what must hold of each
lateness, host_waits, sanitizer    what makes a missing order between streams show
runner      starts ranks and has them run checks: one world of processes for each subject

On the CPU, with Gloo, the same functions run where they can, so that what is left to a GPU is the GPU.
"""
