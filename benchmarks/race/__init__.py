"""`python -m benchmarks.race`: who reaches a target first, on a link of a known speed; docs/reports/races.md.

tasks      the models, their data and metrics;  contest: the contestants, and the training of one of them
results    the curves in a file;  tables: standings
"""
