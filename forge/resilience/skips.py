"""When too many updates in a row were skipped."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.errors import RunError


class TooManySkips(RunError):
    """More updates in a row were skipped than `train.max_consecutive_skips`; the parameters are as before them."""

    def __init__(self, first: int, last: int, made: int) -> None:
        self.what = (
            f"{last - first + 1} updates in a row were skipped for a non-finite loss or gradient, or a spike"
            f" (updates {first} to {last})"
        )
        super().__init__(
            f"{self.what}: lower optimizer.lr or train.grad_clip_norm; or, where there is a checkpoint of before, go on"
            " from it past this data with --train.max-rollbacks 1"
        )
        self.first = first  # number of the first skipped update, from 1
        self.made = made  # updates made until they were noticed


class SkipLimit:
    """Counts updates skipped in a row, reading their flags from the device only every few steps.

    Args:
        limit: most in a row.
        check_interval: updates between looks.
        done: updates made before.
    """

    def __init__(self, limit: int, check_interval: int, done: int = 0) -> None:
        self.limit = limit
        self.check_interval = min(check_interval, limit)
        self._made = done
        self._unread: list[Tensor] = []
        self._in_a_row = 0

    def note(self, skipped: Tensor) -> None:
        """Take the flag of one update, bool ().

        Raises:
            TooManySkips: more than `limit` in a row. The skipped updates left the parameters as they were.
        """
        self._made += 1
        self._unread.append(skipped)
        if len(self._unread) < self.check_interval:
            return
        flags, self._unread = torch.stack(self._unread).tolist(), []
        for number, flag in enumerate(flags, start=self._made - len(flags) + 1):
            self._in_a_row = self._in_a_row + 1 if flag else 0
            if self._in_a_row > self.limit:
                raise TooManySkips(number - self._in_a_row + 1, number, self._made)
