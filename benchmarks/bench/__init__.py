"""`python -m benchmarks.bench`: step times of chains beside the ways that PyTorch has, on a link of a known speed."""
