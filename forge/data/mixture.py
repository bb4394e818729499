"""Which source a sequence comes from, and which of that source's: functions of the sequence's number in the run.

Nothing is kept between calls and nothing grows with the data: an order of at most 32,768 places, repeated for ever, for
each stretch of the run between two changes of the weights.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from forge.errors import ConfigError

MOST_PLACES = 1 << 15
_CLOSE = 1e-9  # a share this close to the wanted one is off by one sequence in a billion


def shares_of(weights: Sequence[float], temperature: float = 1.0) -> NDArray[np.float64]:
    """weight^(1 / temperature), normalised, (K,): above 1 the shares come closer to each other; 0 stays 0."""
    powers = np.array(weights, dtype=np.float64) / max(weights)
    powers = np.where(powers > 0, powers ** (1 / temperature), 0.0)
    return powers / powers.sum()


@frozen
class _Stretch:
    """Sequences of constant shares: a round of sources, again and again."""

    first: int  # number of its first sequence in the run
    before: NDArray[np.int64] = field(eq=False, repr=False)  # (K,): of each source, drawn before this stretch
    order: NDArray[np.int16] = field(eq=False, repr=False)  # (places,): the source at each place of the round
    rank: NDArray[np.int32] = field(eq=False, repr=False)  # (places,): how many earlier places have the same source
    counts: NDArray[np.int64] = field(eq=False, repr=False)  # (K,): places of each source

    def drawn(self, sequences: int) -> NDArray[np.int64]:
        """Of each source, among the run's first ones up to `sequences` into this stretch, (K,)."""
        rounds, rest = divmod(sequences, len(self.order))
        return self.before + rounds * self.counts + np.bincount(self.order[:rest], minlength=len(self.counts))


@frozen
class Mixture:
    """Places in the run -> sources, and places in each source's own endless row."""

    stretches: tuple[_Stretch, ...]

    def place(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each sequence of the run, and how many of that source came before it, (n,) -> (n,), (n,).

        After any number of sequences since the weights last changed, each of K sources has had its share to within
        1 - 1/(2K - 2) sequences; over any block of them to within twice as many.
        """
        firsts = [stretch.first for stretch in self.stretches]
        source, position = np.empty_like(index), np.empty_like(index)
        which = np.searchsorted(firsts, index, side="right") - 1
        for at in np.unique(which):
            stretch, here = self.stretches[at], which == at
            rounds, place = np.divmod(index[here] - stretch.first, len(stretch.order))
            drawn = stretch.order[place]
            source[here] = drawn
            position[here] = stretch.before[drawn] + rounds * stretch.counts[drawn] + stretch.rank[place]
        return source, position


def build_mixture(changes: Sequence[tuple[int, Sequence[float]]], temperature: float = 1.0) -> Mixture:
    """Sources mixed by weights that change at given sequences; each goes on where it was.

    Args:
        changes: (number of the first sequence, weight of each source), in order; the first begins at 0.
        temperature: see `shares_of`.

    Raises:
        ConfigError: a share is so small that its source would not be drawn in a whole round.
    """
    stretches: list[_Stretch] = []
    for first, weights in changes:
        before = np.zeros(len(weights), np.int64)
        if stretches:
            before = stretches[-1].drawn(first - stretches[-1].first)
        counts = _places(shares_of(weights, temperature))
        order = _even_order(counts)
        stretches.append(_Stretch(first, before, order, _ranks(order, len(counts)), counts))
    return Mixture(tuple(stretches))


def _places(shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole places in a round, (K,): of the shortest round that meets the shares, else of the one that comes closest.

    With two or three sources the shares are met to about 1e-7; with many, to 1 / 65,536.
    """
    wanted = shares[shares > 0]
    lengths = np.arange(1, MOST_PLACES + 1)
    rounded = np.rint(lengths[:, None] * wanted)
    miss = np.abs(rounded / lengths[:, None] - wanted).max(axis=1)
    miss[(rounded.sum(axis=1) != lengths) | (rounded.min(axis=1) < 1)] = np.inf
    if not np.isfinite(miss.min()):
        raise ConfigError(
            f"a data weight is {wanted.min():.2g} of the whole, less than one sequence in {MOST_PLACES}:"
            " raise it, or set it to 0"
        )
    counts = np.zeros(len(shares), np.int64)
    counts[shares > 0] = rounded[np.argmax(miss <= max(float(miss.min()), _CLOSE))]
    return counts


def _even_order(counts: NDArray[np.int64]) -> NDArray[np.int16]:
    """A round in which every prefix has each source's share to within 1 - 1/(2K - 2) places.

    Such an order exists (Tijdeman 1980, "The chairman assignment problem"), and taking the most urgent source that is
    not early finds it: the bound gives each place of a source a first and a last moment. The bound is the best there is
    for all shares, and but for a few shares no order of three or more sources keeps every block within one place
    (Fraenkel 1973).
    """
    length, order = int(counts.sum()), []
    drawn = [(source, int(count)) for source, count in enumerate(counts) if count]
    slack = max(2, 2 * len(drawn) - 2)

    def moment(of: int, numerator: int) -> int:
        return -(-length * numerator // (slack * of))  # rounded up

    waiting = [(moment(count, 1), source, count, 0) for source, count in drawn]  # by first moment
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int, int]] = []  # by last moment
    for now in range(1, length + 1):
        while waiting and waiting[0][0] <= now:
            _, source, count, done = heapq.heappop(waiting)
            last = length * (slack - 1 + slack * done) // (slack * count) + 1
            heapq.heappush(ready, (last, source, count, done))
        _, source, count, done = heapq.heappop(ready)
        order.append(source)
        heapq.heappush(waiting, (moment(count, 1 + slack * (done + 1)), source, count, done + 1))
    return np.array(order, np.int16)


def _ranks(order: NDArray[np.int16], sources: int) -> NDArray[np.int32]:
    """How many earlier places have the same source, (places,)."""
    ranks = np.empty(len(order), np.int32)
    for source in range(sources):
        places = np.flatnonzero(order == source)
        ranks[places] = np.arange(len(places))
    return ranks
