"""A campaign of faults: groups of ranks that are killed, stopped, starved and misled, and must fail cleanly and resume.

`make soak MINUTES=10`, or `PYTHONPATH=tests python -m soak --minutes 10`. A trial is a fresh group of two to four
processes on Gloo, a form of training (`forms.py`) and one fault at a random moment. `trial.py` has the faults and what
must hold then, and `docs/reports/reliability.md` says it in words.
"""
