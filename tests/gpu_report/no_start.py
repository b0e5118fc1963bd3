"""A part of `make gpu` that cannot be imported."""

raise ImportError("no such library")
