"""A corpus of ordinary training loops, each played plain and with every form of update, and compared bit for bit."""
