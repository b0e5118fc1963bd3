"""The private parts of PyTorch that this library uses, one module per topic, each use with its reason.

All of them are in the table of :mod:`overlap._torch.private`, which is checked here.

Elsewhere a name of PyTorch's that starts with an underscore is read by one algorithm alone, where it needs it: DDP's
under a Join (:mod:`overlap.join.adapters`), and those of frameworks in :mod:`overlap.integrations`. A name here without
one is for the rest of the package.
"""

from overlap._torch.private import check_private_parts

check_private_parts()
