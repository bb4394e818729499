"""Which batch an update reads in a run that rolled back: what led to bad updates is jumped over, nothing is repeated.

Going back to an earlier checkpoint and on past the data since is what PaLM's training did about loss spikes (Chowdhery
et al. 2022, sec. 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence

Jumps = Sequence[Sequence[int]]
"""A run's rollbacks in order: (updates made where it went on, batches jumped over there). Kept in every checkpoint."""


def batch_index(jumps: Jumps, step: int) -> int:
    """The batch that the update after `step` others reads; `step` itself in a run that never rolled back."""
    return step + sum(batches for at, batches in _standing(jumps) if at <= step)


def jump_over(jumps: Jumps, *, failed: int, back_to: int) -> list[list[int]]:
    """The jumps after one more rollback, from `failed` updates made back to `back_to`.

    The next update reads the batch that would have followed in the failed attempt.
    """
    kept = [jump for jump in _standing(jumps) if jump[0] <= back_to]
    batches = batch_index(jumps, failed) - batch_index(kept, back_to)
    return [*map(list, jumps), [back_to, batches]]


def _standing(jumps: Jumps) -> list[Sequence[int]]:
    """Without the jumps that a later rollback went back before."""
    standing: list[Sequence[int]] = []
    for jump in jumps:
        standing = [earlier for earlier in standing if earlier[0] <= jump[0]] + [jump]
    return standing
