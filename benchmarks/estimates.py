"""The table of estimates in docs/choose.md, in Markdown: `python -m benchmarks.estimates`."""

from collections.abc import Iterator

from overlap.estimate import CHAINS, Job, step_ms

_LINKS = {
    "1 Gbit/s": (1.0, 4, 8),
    "10 Gbit/s": (10.0, 4, 8),
    "25 Gbit/s": (25.0, 4, 8),
    "100 Gbit/s": (100.0, 4, 8),
    "one machine, PCIe": (100.0, 8, 1),
    "one machine, NVLink": (2960.0, 8, 1),
}
_MICROBATCHES = (1, 8)
_LEFT_OUT = ("DDP", "Quantize(Int8()), ZeroStep(gather='forward')", "HSDP", "HSDP, Quantize(Int8())")


def grid() -> Iterator[str]:
    """How many times as fast as DDP: by link and by tokens a rank and synchronization. The size of the model cancels:
    computing, sending and updating all grow with it."""
    chains = [chain for chain in CHAINS if chain.name not in _LEFT_OUT]
    yield f"| link of a machine | tokens | {' | '.join(f'`{chain.name}`' for chain in chains)} |"
    yield f"| --- | ---: |{' ---: |' * len(chains)}"
    for link, (gbit, machines, ranks) in _LINKS.items():
        for microbatches in _MICROBATCHES:
            job = Job(link_gbit=gbit, machines=machines, ranks_a_machine=ranks, microbatches=microbatches)
            plain = step_ms(job, CHAINS[0])
            cells = [f"{plain / step_ms(job, chain):.1f}" for chain in chains]
            yield f"| {link} | {job.tokens * microbatches:,} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(grid()))
