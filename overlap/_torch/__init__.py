"""The private parts of PyTorch that this library uses, one module per topic, each use with its reason.

Nothing else in the package reads a PyTorch name that starts with an underscore. A name here without one is for the rest
of the package.
"""
