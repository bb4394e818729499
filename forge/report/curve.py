"""One metric over steps, in bounded memory however long the run."""

from __future__ import annotations

from collections.abc import Callable

Point = tuple[float, int]
"""(value, step), in this order so that min and max compare values."""


class Curve:
    """The values of one key: all of them up to `limit` steps, beyond it the least and the largest of each bucket.

    Buckets of steps double in width whenever there are more than `limit`, so that a peak of a single step stays
    visible in any run. First, last, least and largest value are exact.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._limit, self._width = limit, 1
        self._buckets: dict[int, tuple[Point, Point]] = {}  # number of the bucket -> least, largest
        self._first: Point | None = None
        self._last: Point | None = None
        self.count = 0

    def add(self, step: int, value: float) -> None:
        """Take a finite value; steps may come in any order."""
        point = (value, step)
        self.count += 1
        self._first = point if self._first is None or step < self._first[1] else self._first
        self._last = point if self._last is None or step >= self._last[1] else self._last
        self._put(step // self._width, point, point)
        if len(self._buckets) > self._limit:
            self.shrink(self._limit)

    def shrink(self, limit: int) -> None:
        """Keep at most `limit` >= 1 buckets from now on."""
        self._limit = limit
        while len(self._buckets) > limit:
            held, self._buckets = self._buckets, {}
            self._width *= 2
            for index, (least, largest) in held.items():
                self._put(index // 2, least, largest)

    def points(self) -> list[tuple[int, float]]:
        """(step, value) in the order of steps."""
        kept = {point for bucket in self._buckets.values() for point in bucket}
        return sorted((step, value) for value, step in kept)

    @property
    def first(self) -> Point | None:
        """Of the smallest step; None without values, as for the others."""
        return self._first

    @property
    def last(self) -> Point | None:
        """Of the largest step."""
        return self._last

    @property
    def least(self) -> Point | None:
        """The smallest value."""
        return self._best(min, 0)

    @property
    def largest(self) -> Point | None:
        """The largest value."""
        return self._best(max, 1)

    def _best(self, better: Callable[..., Point | None], side: int) -> Point | None:
        return better((bucket[side] for bucket in self._buckets.values()), default=None)

    def _put(self, index: int, least: Point, largest: Point) -> None:
        held = self._buckets.get(index)
        if held is not None:
            least, largest = min(held[0], least), max(held[1], largest)
        self._buckets[index] = least, largest
