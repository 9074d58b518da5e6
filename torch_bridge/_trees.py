"""The tensors in what modules take and return: in containers, also in those that torch's pytrees do not know."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

Rebuild = Callable[[list[Any]], Any]


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples, dicts, dataclasses and whatever is registered with torch's pytrees.

    Example:
      >>> [x.item() for x in tensors_in({"a": (torch.tensor(1), "text"), "b": [torch.tensor(2)]})]
      [1, 2]
    """
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for child in _open(tree)[0]:
            yield from tensors_in(child)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The same containers with other tensors. What holds none that changes stays the object that it was.

    Dataclasses and subclasses of containers are copied, not constructed: they may be frozen, and what their
    constructors do is not done twice.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    children, rebuild = _open(tree)
    mapped = [map_tensors(function, child) for child in children]
    return tree if all(x is y for x, y in zip(mapped, children, strict=True)) else rebuild(mapped)


def _open(tree: Any) -> tuple[Sequence[Any], Rebuild]:
    """What is in a container, and what makes one like it with other contents."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return tree, kind
    if kind is dict:
        return list(tree.values()), lambda values: dict(zip(tree, values, strict=True))
    children, spec = tree_flatten(tree, is_leaf=lambda x: x is not tree)
    if not spec.is_leaf():
        return children, partial(tree_unflatten, treespec=spec)
    if is_dataclass(kind):
        names = [field.name for field in fields(tree) if hasattr(tree, field.name)]
        return [getattr(tree, name) for name in names], partial(_with_fields, tree, names)
    if isinstance(tree, dict):
        return list(tree.values()), partial(_with_items, tree, list(tree))
    if isinstance(tree, list):
        return tree, partial(_with_items, tree, range(len(tree)))
    if isinstance(tree, tuple):
        return tree, partial(tuple.__new__, kind)
    return (), list


def _with_fields(tree: Any, names: Sequence[str], values: list[Any]) -> Any:
    new = copy.copy(tree)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(new, name, value)
        if isinstance(new, dict) and name in new:  # as Hugging Face's outputs, which are both
            dict.__setitem__(new, name, value)
    return new


def _with_items(tree: Any, keys: Sequence[Any], values: list[Any]) -> Any:
    new = copy.copy(tree)
    for key, value in zip(keys, values, strict=True):
        new[key] = value
    return new
