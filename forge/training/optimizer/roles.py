"""Which parameter is what: the one rule behind weight decay and Muon. By role, never by shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

Role = Literal["hidden", "router", "head", "embedding", "vector"]
"""hidden: a matrix inside a block (or one matrix an expert). vector: norms and biases."""


def parameter_role(name: str, ndim: int) -> Role:
    """The role of a parameter by its fully-qualified name; works on models that are not ours too.

    A tied embedding is an embedding. Names unknown to us are hidden matrices when they have two or more dimensions.
    """
    module = name.removesuffix(".weight").removesuffix(".bias").split(".")
    if ndim < 2 or name.endswith("bias") or "norm" in module[-1]:
        return "vector"
    if any("embed" in part or part in ("wte", "wpe") for part in module):
        return "embedding"
    if module[-1] in ("head", "lm_head"):
        return "head"
    return "router" if module[-1] in ("router", "shared_gate") else "hidden"


def parameter_roles(params: nn.Module | Mapping[str, Tensor]) -> dict[str, Role]:
    """Name -> role of every parameter of a module or a dict."""
    named = dict(params.named_parameters()) if isinstance(params, nn.Module) else params
    return {name: parameter_role(name, p.dim()) for name, p in named.items()}


def decays(role: Role) -> bool:
    """Weight decay acts on matrices only: no norm, bias or embedding."""
    return role in ("hidden", "router", "head")


def decayed_names(roles: Mapping[str, Role]) -> frozenset[str]:
    """The parameters that weight decay acts on."""
    return frozenset(name for name, role in roles.items() if decays(role))
