"""The private parts of PyTorch that this library touches, one module a topic, each use with its reason.

Nothing else in the package reads a PyTorch name that starts with an underscore.
"""
