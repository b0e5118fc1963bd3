"""Seventy faults in the package, one for each promise, and a command that shows which tests find them."""
