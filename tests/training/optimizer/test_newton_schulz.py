"""Orthogonalisation: singular values go to about 1, singular vectors stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import Muon
from forge.training.optimizer.newton_schulz import coefficients, newton_schulz, orthogonalise

STEPS = Muon().ns_steps


def _in_singular_basis(matrix, orthogonal):
    """Singular values of a matrix, and what its orthogonalisation makes of each: the diagonal of U^T O V."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    turned = u.mT @ orthogonal.double() @ vh.mT
    return s, turned.diagonal(), turned - torch.diag(turned.diagonal())


@pytest.mark.parametrize("shape", [(256, 256), (96, 96), (96, 24), (24, 96), (5, 5), (1, 7), (7, 1), (1, 1)])
@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_singular_values_land_in_0_6_to_1_3_and_directions_of_zero_stay_zero(shape, rank, size):
    matrix = torch.randn(shape) if rank is None else torch.randn(shape[0], rank) @ torch.randn(rank, shape[1])
    before, after, elsewhere = _in_singular_basis(matrix, orthogonalise(matrix * size, STEPS))
    # A Gaussian matrix may be as near to singular as chance has it: the promise is for 1e-3 of the largest and above.
    real = before >= 1e-3 * before[0]
    assert after[real].min() >= 0.6 and after[real].max() <= 1.3
    assert after.min() >= -1e-3 and after.max() <= 1.3
    null = before < 1e-5 * before[0]
    assert (after[null].abs() < 1e-2).all()
    assert elsewhere.abs().max() < 1e-2


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 9999), rows=st.integers(1, 12), cols=st.integers(1, 12), smallest=st.floats(-3.0, 0.0))
def test_any_spectrum_down_to_a_thousandth_lands_in_0_6_to_1_3(seed, rows, cols, smallest):
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(rows, cols, generator=generator), full_matrices=False)
    values = 10 ** (smallest * torch.rand(min(rows, cols), generator=generator))
    values[0] = 1.0
    after = torch.linalg.svdvals(orthogonalise(u * values @ vh, STEPS))
    assert after.min() >= 0.6 and after.max() <= 1.3


@pytest.mark.parametrize("shape", [(64, 64), (64, 16), (16, 64), (1, 8)])
@pytest.mark.parametrize("rank", [1, 64])
def test_bf16_arithmetic_stays_within_bounds(shape, rank):
    matrix = torch.randn(shape) if rank > 1 else torch.randn(shape[0], 1) @ torch.randn(1, shape[1])
    unit = matrix / torch.linalg.matrix_norm(matrix)
    before, after, _ = _in_singular_basis(matrix, newton_schulz(unit.to(torch.bfloat16), STEPS))
    real = before >= 5e-3 * before[0]
    assert after[real].min() >= 0.6 and after.max() <= 1.3


def test_the_dtype_of_the_iterations_is_as_asked_and_that_of_the_result_as_given():
    matrix = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    unit = (matrix / torch.linalg.matrix_norm(matrix)).to(torch.bfloat16)
    assert torch.equal(orthogonalise(matrix, STEPS, torch.bfloat16), newton_schulz(unit, STEPS).float())
    assert torch.equal(orthogonalise(matrix, STEPS), orthogonalise(matrix, STEPS, torch.float32))


def test_a_batch_is_its_matrices_one_by_one():
    batch = torch.randn(3, 5, 4)
    apart = torch.stack([orthogonalise(matrix, STEPS) for matrix in batch])
    torch.testing.assert_close(orthogonalise(batch, STEPS), apart)


def test_transposing_commutes():
    matrix = torch.randn(6, 4)
    torch.testing.assert_close(orthogonalise(matrix.mT, STEPS), orthogonalise(matrix, STEPS).mT)


def test_many_steps_converge_to_the_polar_factor():
    matrix = torch.randn(7, 4)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(orthogonalise(matrix, 12), u @ vh, rtol=1e-4, atol=1e-5)


def test_zeros_stay_zeros_and_do_not_disturb_the_rest_of_the_batch():
    batch = torch.stack([torch.zeros(4, 4), torch.eye(4)])
    done = orthogonalise(batch, STEPS)
    assert torch.equal(done[0], torch.zeros(4, 4))
    torch.testing.assert_close(done[1].diagonal(), torch.ones(4), rtol=0.0, atol=0.3)


def test_there_are_as_many_polynomials_as_steps_and_the_last_has_1_as_fixed_point():
    for steps in (1, 5, 20):
        assert len(coefficients(steps)) == steps
    assert sum(coefficients(20)[-1]) == 1.0
