"""A random order in constant memory: the element at any place of a permutation, without making the permutation."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


def permuted(index: int, length: int, seed: int) -> int:
    """Where the permutation of [0, length) drawn by `seed` sends `index`.

    Raises:
        IndexError: index is not in [0, length).
    """
    return int(permuted_array(np.array([index]), length, seed)[0])


def permuted_array(indices: NDArray[np.int64], length: int, seed: int) -> NDArray[np.int64]:
    """`permuted` of each index, (n,) -> (n,).

    A balanced Feistel network (Luby and Rackoff 1988) permutes the smallest [0, 4^h) that holds [0, length); a value
    that lands beyond is sent on until it lands within (cycle walking, Black and Rogaway 2002), fewer than four times
    on average.

    Raises:
        IndexError: an index is not in [0, length).
    """
    indices = np.asarray(indices, dtype=np.int64)
    outside = (indices < 0) | (indices >= length)
    if outside.any():
        raise IndexError(f"index {indices[outside][0]} is not in [0, {length})")
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed)
    result = _feistel(indices.astype(np.uint64), half, keys)
    beyond = np.flatnonzero(result >= length)
    while beyond.size:
        result[beyond] = _feistel(result[beyond], half, keys)
        beyond = beyond[result[beyond] >= length]
    return result.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(seed: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(str(seed).encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
