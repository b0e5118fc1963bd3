"""`python -m overlap demo`: ResNet-18 on handwritten digits, by plain DDP and by a chain, compared.

command     the options, and the ranks they start
experiment  what every rank does: the data, the two runs, the comparison, and the report of rank 0
"""
