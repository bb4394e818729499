"""Keys and values of the tokens that a model has read, so that it reads each only once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

KeyValue = tuple[Tensor, Tensor]
"""Keys and values, each (B, kv_heads, S, head_width); kv_heads are those of this rank."""
Keep = Callable[[Tensor, Tensor], KeyValue]
"""(keys and values of the tokens being read) -> those of all tokens, the new ones last."""


class Cache:
    """What the layers here have kept of the tokens read so far; changed in place, and room grows by doubling."""

    def __init__(self, padding: Tensor | None = None) -> None:
        self.length = 0
        """Tokens read, padding included."""
        self.padding = padding
        """int64 (B,): places at the start of each row that hold no token; None = every place holds one."""
        self._layers: dict[str, KeyValue] = {}

    def keep(self, layer: str, keys: Tensor, values: Tensor) -> KeyValue:
        """Put keys and values behind those of the tokens read; the next call of `advance` makes them part of these."""
        end = self.length + keys.shape[2]
        held = self._layers.get(layer)
        if held is None or held[0].shape[2] < end:
            before = (None, None) if held is None else held
            held = self._with_room(before[0], keys, end), self._with_room(before[1], values, end)
            self._layers[layer] = held
        for store, new in zip(held, (keys, values), strict=True):
            store[:, :, self.length : end] = new
        return held[0][:, :, :end], held[1][:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count tokens as read once every layer has kept them; what was kept beyond is overwritten next."""
        self.length += tokens

    def _with_room(self, held: Tensor | None, new: Tensor, tokens: int) -> Tensor:
        store = new.new_empty(*new.shape[:2], max(64, 2 * tokens), new.shape[3])
        if held is not None:
            store[:, :, : self.length] = held[:, :, : self.length]
        return store
