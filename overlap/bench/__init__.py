"""`python -m overlap bench`: every claim beside PyTorch's own, on a link of known speed.

command     the options; makes the link, starts the ranks, reports
settings    the options, checked, and the `RunConfig` that every rank is told
link        a network namespace for each rank, joined by links of a given speed
rank        one rank: a trial of every variant, then the timing;  measurements: what it finds
job         runs something in a forked child that may abort or hang
world       the process group of a trial or a timing;  file_exchange: values between ranks that send no traffic
trial       one variant alone: does it run, what does it send, how much memory does it take
timing      variants timed together, taking turns
variant     what a variant is;  variants: all of them, the one place to add a row;  registry: which ones to run
training_setup   what a variant is built from;  workload: the models and their data
wire        bytes sent, read from the interface or the sockets
collectives  bytes counted at the collective;  simulated, transfers: a link that only exists in arithmetic
memory      peak memory;  proc: values from /proc;  floor: the least time that a step can take
results     the rows;  report: the table;  plot: the picture
"""
