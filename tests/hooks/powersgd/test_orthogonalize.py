"""Each algorithm gives orthonormal bases for any rows, with the span of the rows."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlap.hooks.powersgd.algorithm import cholesky_qr, householder_qr

ALGORITHMS = {"householder": lambda rows, spare: householder_qr(rows), "cholesky_qr": cholesky_qr}


def _rows(seed: int, count: int, rank: int, length: int, dependent: int, scale: float) -> torch.Tensor:
    """Rows of which the last `dependent` are combinations of the others (or zero, where there are none)."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, rank, length, generator=generator)
    free = rank - dependent
    mix = torch.randn(count, dependent, free, generator=generator)
    rows[:, free:] = mix @ rows[:, :free]
    return rows * scale


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(deadline=None, max_examples=40)
@example(seed=977, count=3, rank=7, more=0, dependent=3, scale=1e-15)  # The factorization fails at its last row.
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 3),
    rank=st.integers(1, 8),
    more=st.integers(0, 40),
    dependent=st.integers(0, 8),
    scale=st.sampled_from([1e-15, 1.0, 1e15]),
)
def test_every_algorithm_gives_an_orthonormal_basis_of_the_span(
    name: str, seed: int, count: int, rank: int, more: int, dependent: int, scale: float
) -> None:
    rows = _rows(seed, count, rank, rank + more, min(dependent, rank), scale)
    spare = torch.linalg.qr(torch.randn(rank + more, rank, generator=torch.Generator().manual_seed(seed + 1)))[0].mT
    basis = ALGORITHMS[name](rows, spare)
    identity = torch.eye(rank).expand(count, -1, -1)
    torch.testing.assert_close(basis @ basis.mT, identity, rtol=0, atol=2e-5)
    # In float64, so that only the algorithm's own loss shows.
    found = (rows.double() @ basis.double().mT) @ basis.double()
    size = torch.linalg.vector_norm(rows.double(), dim=-1, keepdim=True).clamp_min(1e-300)
    assert float(((found - rows.double()).norm(dim=-1, keepdim=True) / size).max()) < 3e-5
