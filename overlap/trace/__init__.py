"""`python -m overlap trace`: the demo's model in a plain and an overlapped step, as a picture and a trace."""
