"""The cache gives back what it was given, in order, however its room grows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.model.cache import Cache

PIECES = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 3)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=30)
@given(pieces=PIECES)
def test_each_layer_gets_all_that_was_read_and_what_was_read_too_far_is_forgotten(pieces):
    cache, read = Cache(), {"0": [], "3": []}
    for number, (tokens, beyond) in enumerate(pieces):
        for layer, before in read.items():
            keys = torch.full((2, 1, tokens + beyond, 4), float(number)) + int(layer)
            found = cache.keep(layer, keys, -keys)
            expected = torch.cat([*before, keys], dim=2)
            assert torch.equal(found[0], expected) and torch.equal(found[1], -expected)
            before.append(keys[:, :, :tokens])
        cache.advance(tokens)
    assert cache.length == sum(tokens for tokens, _ in pieces)


def test_room_is_made_seldom():
    cache, places = Cache(), set()
    for _ in range(1000):
        keys, _ = cache.keep("0", torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        places.add(keys.data_ptr())
        cache.advance(1)
    assert len(places) <= 6
