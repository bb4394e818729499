"""When too many updates in a row were skipped."""

from __future__ import annotations

from torch import Tensor

from forge.errors import RunError


class SkipLimit:
    """Counts updates skipped in a row, reading their flags from the device only every few steps."""

    def __init__(self, limit: int, check_interval: int) -> None:
        self.limit = limit
        self.check_interval = min(check_interval, limit)
        self._unread: list[Tensor] = []
        self._in_a_row = 0

    def note(self, skipped: Tensor) -> None:
        """Take the flag of one update, bool ().

        Raises:
            RunError: more than `limit` in a row. The skipped updates left the parameters as they were.
        """
        self._unread.append(skipped)
        if len(self._unread) < self.check_interval:
            return
        flags, self._unread = [bool(flag) for flag in self._unread], []
        for flag in flags:
            self._in_a_row = self._in_a_row + 1 if flag else 0
            if self._in_a_row > self.limit:
                raise RunError(
                    f"{self._in_a_row} updates in a row were skipped for a non-finite loss or gradient: lower"
                    " optimizer.lr or train.grad_clip_norm and start from the last checkpoint, which is intact"
                )
