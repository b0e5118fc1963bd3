"""The `race` command: real training to a target, on a link of a known speed, plain DDP beside chains.

settings      the options, checked, and what each task takes where they say nothing
tasks         what is trained, with its data, its optimizer and what is measured: images (digits, cifar) and text
contestants   the ways to train, by name
training      one rank trains one contestant, with a clock that runs while it trains
rank          what a rank does: one contestant and seed after the other, each in a child of its own
results       the curves, kept in a JSON cell by cell;  standings: what follows from them for a target
table         the table, for a terminal and a document;  picture: the curves
"""
