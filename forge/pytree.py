"""Pytrees: registration of our attrs classes with optree and `torch.func`, and arithmetic on trees of tensors.

Every tree function here knows the namespace, so that callers write `tree_map(f, state)` and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import attrs
import optree
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

NAMESPACE = "forge"
PyTree = Any

T = TypeVar("T")


def register_node(cls: type[T]) -> type[T]:
    """Class decorator: make an attrs class a pytree node whose children are its fields, in order."""
    names = tuple(attribute.name for attribute in attrs.fields(cls))  # type: ignore[arg-type]

    def children(node: Any) -> tuple[Any, ...]:
        return tuple(getattr(node, name) for name in names)

    node_class: Any = cls  # optree types its nodes as collections, which attrs classes are not
    optree.register_pytree_node(
        node_class,
        lambda node: (children(node), None, names),
        lambda _, values: node_class(*values),
        path_entry_type=optree.GetAttrEntry,
        namespace=NAMESPACE,
    )

    # torch's pytrees count None as a leaf and `torch.func` refuses such leaves: an absent field is no child there.
    def present(node: Any) -> tuple[str, ...]:
        return tuple(name for name in names if getattr(node, name) is not None)

    torch_pytree.register_pytree_node(
        cls,
        lambda node: ([getattr(node, name) for name in present(node)], present(node)),
        lambda values, kept: cls(**dict.fromkeys(names) | dict(zip(kept, values, strict=True))),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=lambda node: (
            [(torch_pytree.GetAttrKey(name), getattr(node, name)) for name in present(node)],
            present(node),
        ),
    )
    return cls


def register_closed_node(cls: type, refuse: Callable[..., NoReturn]) -> None:
    """Make every pytree function that meets an instance of `cls` call `refuse`, which raises."""
    optree.register_pytree_node(cls, refuse, refuse, namespace=NAMESPACE)
    torch_pytree.register_pytree_node(cls, refuse, refuse)


def tree_map(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Apply `fn` to the corresponding leaves of trees of one structure."""
    return optree.tree_map(fn, tree, *rest, namespace=NAMESPACE)


def tree_leaves(tree: PyTree) -> list[Any]:
    """The leaves, left to right."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def tree_structure(tree: PyTree) -> Any:
    """The shape of the tree, comparable with ==."""
    return optree.tree_structure(tree, namespace=NAMESPACE)


def tree_flatten_named(tree: PyTree) -> dict[str, Any]:
    """`path -> leaf`, the path's steps joined by `/`: `params/blocks.0.attn.wq.weight`."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, namespace=NAMESPACE)
    return {"/".join(str(step) for step in path): leaf for path, leaf in zip(paths, leaves, strict=True)}


def tree_unflatten_named(template: PyTree, leaves: dict[str, Any]) -> PyTree:
    """Inverse of `tree_flatten_named`: the template's structure with leaves taken by path.

    Raises:
        KeyError: a path of the template is missing in `leaves`.
    """
    structure = tree_structure(template)
    return optree.tree_unflatten(structure, [leaves[path] for path in tree_flatten_named(template)])


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype in which sums of such tensors, and optimizer arithmetic on them, are made: fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """A tensor in its wide dtype; itself where it has it, which is asked of every leaf in every step."""
    return tensor if tensor.dtype == torch.float32 else tensor.to(wide(tensor))


def tree_add(left: PyTree, right: PyTree) -> PyTree:
    """Leafwise left + right."""
    return tree_map(torch.add, left, right)


def tree_sub(left: PyTree, right: PyTree) -> PyTree:
    """Leafwise left - right."""
    return tree_map(torch.sub, left, right)


def tree_scale(tree: PyTree, factor: float | Tensor) -> PyTree:
    """Leafwise tree * factor."""
    return tree_map(lambda leaf: leaf * factor, tree)


def tree_zeros_like(tree: PyTree) -> PyTree:
    """Zeros of the leaves' shapes and dtypes."""
    return tree_map(torch.zeros_like, tree)


def tree_where(condition: Tensor, yes: PyTree, no: PyTree) -> PyTree:
    """Leafwise torch.where on one boolean () tensor."""
    return tree_map(lambda y, n: torch.where(condition, y, n), yes, no)


def tree_dot(left: PyTree, right: PyTree) -> Tensor:
    """Sum over all leaves of sum(left * right), fp32 ()."""
    products = tree_leaves(tree_map(lambda a, b: (a.float() * b.float()).sum(), left, right))
    return torch.stack(products).sum()


def tree_norm(tree: PyTree) -> Tensor:
    """Global 2-norm over all leaves, fp32 (); 0 for an empty tree."""
    norms = [torch.linalg.vector_norm(leaf, dtype=torch.float32) for leaf in tree_leaves(tree)]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def foreach_norm(named: Mapping[str, Tensor]) -> Tensor:
    """`tree_norm` of a dict by one call for all tensors: faster, but not under `torch.func.vmap`."""
    leaves = list(named.values())
    if not leaves:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(leaves, 2, dtype=torch.float32)))


def tree_stack(trees: Sequence[PyTree]) -> PyTree:
    """K trees of one structure -> one tree with a leading dimension K, the form that `torch.func.vmap` maps over."""
    return tree_map(lambda *leaves: torch.stack(leaves), *trees)


def tree_unstack(tree: PyTree) -> list[PyTree]:
    """Inverse of `tree_stack`."""
    count = len(tree_leaves(tree)[0])
    return [tree_map(lambda leaf, i=i: leaf[i], tree) for i in range(count)]


def tree_clone(tree: PyTree) -> PyTree:
    """A tree that shares no storage with the given one."""
    return tree_map(torch.clone, tree)


def tree_equal(left: PyTree, right: PyTree) -> bool:
    """Same structure and the same bits in every leaf."""
    if tree_structure(left) != tree_structure(right):
        return False
    pairs = zip(tree_leaves(left), tree_leaves(right), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b) for a, b in pairs)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal to the last bit, NaNs and signs of zero included."""
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
