"""`python -m benchmarks.race`: who reaches a target first, on a link of a known speed; docs/time-to-accuracy.md.

contest   the tasks, the contestants, and the training of one of them on every rank
results   the curves in a file, and their table and picture
"""
