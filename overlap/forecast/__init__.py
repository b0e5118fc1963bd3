"""`overlap plan`: the candidates of `overlap.auto` on links and numbers of ranks that are not here.

command     the options; measures or loads a profile, and prints the plan
"""
