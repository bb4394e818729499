"""A module computing with given parameters in place of its own.

What `torch.func.functional_call` does, with the places of the parameters looked up once instead of at every call: on a
small model the look-up costs as much as a tenth of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

Substitute = Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]
"""(params by fully-qualified name) -> a context in which the module computes with them."""


def build_substitute(module: nn.Module) -> Substitute:
    """Find where each parameter of `module` is held; a tied one is held, and replaced, in several places."""
    held: dict[int, list[tuple[dict[str, nn.Parameter | None], str]]] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                held.setdefault(id(parameter), []).append((owner._parameters, key))
    places = {name: held[id(parameter)] for name, parameter in module.named_parameters()}
    flat = [(name, owner, key, owner[key]) for name, where in places.items() for owner, key in where]

    @contextmanager
    def substitute(params: Mapping[str, Tensor]) -> Generator[None, None, None]:
        try:
            for name, owner, key, _ in flat:
                owner[key] = params[name]  # type: ignore[assignment]
            yield
        finally:
            for _, owner, key, own in flat:
                owner[key] = own

    return substitute
