"""Rotary embedding: rotation, relativity, and Llama-3's stretching."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import ModelConfig
from forge.model.rope import apply_rope, rope_frequencies, rotary_table

CONFIG = ModelConfig(dim=16, n_heads=2, max_seq_len=64)


@settings(deadline=None, max_examples=30)
@given(shift=st.integers(0, 1000), distance=st.integers(0, 50))
def test_scores_depend_on_the_distance_only(shift, distance):
    generator = torch.Generator().manual_seed(shift)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator)

    def score(at):
        table = [rotary_table(torch.tensor([p]), CONFIG) for p in (at + distance, at)]
        return (apply_rope(q, table[0]) * apply_rope(k, table[1])).sum()

    torch.testing.assert_close(score(0), score(shift), rtol=1e-3, atol=1e-3)


def test_the_length_of_a_head_is_kept_and_position_zero_is_the_identity():
    x = torch.randn(1, 2, 5, 8)
    turned = apply_rope(x, rotary_table(torch.arange(5), CONFIG))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])


def test_llama3_scaling_keeps_high_frequencies_and_divides_low_ones():
    config = ModelConfig(
        dim=128, n_heads=1, rope_theta=500_000.0, rope_scaling_factor=8.0, rope_original_max_seq_len=8192
    )
    plain = rope_frequencies(ModelConfig(dim=128, n_heads=1, rope_theta=500_000.0))
    scaled = rope_frequencies(config)
    wavelength = 2 * math.pi / plain
    torch.testing.assert_close(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    torch.testing.assert_close(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    assert between.any() and ((scaled <= plain) & (scaled >= plain / 8))[between].all()
