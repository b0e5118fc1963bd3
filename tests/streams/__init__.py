"""The library on simulated streams: scenarios without a race, and mutants that have one."""
