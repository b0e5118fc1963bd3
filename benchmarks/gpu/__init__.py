"""`make gpu`: what can only be seen on a GPU, seen by one command within minutes, and written up.

command     the options; runs the parts one after the other and writes the report after each
plan        the parts, with what the report says of each
parts       what is run, in which order, with which share of the time; one module a part in the folder of that name
crew        the processes of one part: started, watched, ended; what they said, as cases and rows
worker      one such process;  given: what a part is given;  sizes: how large, on a GPU, on a CPU, in a test
lines       what such a process writes, as it is read
report      what was found, as JSON;  markdown: as tables;  page: into docs/benchmarks.md
world       process groups of the parts;  trained: models on a simulated link
"""
