"""The tensors in what modules take and return: in containers, also in those that torch's pytrees do not know."""

import copy
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

Rebuild = Callable[[list[Any]], Any]
Write = Callable[[Any, Any], None]
"""Puts a value in the place that a key names."""
_PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None), torch.device, torch.dtype})

_SIZED = list | tuple | dict | deque
_CHANGE = frozenset({OrderedDict, defaultdict, deque})  # torch's pytrees know them, and would make others


def tensors_in(tree: Any, most: float = math.inf) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples, dicts, dataclasses and whatever is registered with torch's pytrees.

    Into containers of more than `most` items it does not look.

    Example:
      >>> [x.item() for x in tensors_in({"a": (torch.tensor(1), "text"), "b": [torch.tensor(2)]})]
      [1, 2]
    """
    return _tensors_in(tree, most, set())


def _tensors_in(tree: Any, most: float, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif type(tree) not in _PLAIN and id(tree) not in seen and not (isinstance(tree, _SIZED) and len(tree) > most):
        opened = _open(tree)
        if opened.write is not None:  # those alone may contain themselves
            seen.add(id(tree))
        for child in opened.children:
            yield from _tensors_in(child, most, seen)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The same containers with other tensors. What holds none that changes stays the object that it was.

    Dataclasses and subclasses of containers are copied, not constructed: they may be frozen, and what their
    constructors do is not done twice.
    """
    return _mapped(function, tree, ())


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], tree: Any, around: tuple[int, ...]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) in _PLAIN or id(tree) in around:
        return tree
    opened, around = _open(tree), (*around, id(tree))
    mapped = [_mapped(function, child, around) for child in opened.children]
    same = all(x is y for x, y in zip(mapped, opened.children, strict=True))
    return tree if same else opened.rebuild(mapped)


def lend_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], tree: Any
) -> tuple[Any, Callable[[], None] | None]:
    """The same with the containers that can change kept, so that what is added to them is not added to a copy.

    Returns:
      The tree, and what puts the tensors that are still there back to what they were, or None if none changed.
    """
    written: list[Any] = []
    seen: set[int] = set()
    back: dict[int, tuple[Any, Any]] = {}

    def lent(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            new = function(node)
        elif type(node) in _PLAIN or id(node) in seen:
            return node
        else:
            opened = _open(node)
            if opened.write is not None:
                seen.add(id(node))
            mapped = [lent(child) for child in opened.children]
            if all(x is y for x, y in zip(mapped, opened.children, strict=True)):
                return node
            if opened.write is not None:
                opened.put(mapped)
                written.append(node)
                return node
            new = opened.rebuild(mapped)
        if new is not node:
            back[id(new)] = new, node
        return new

    def give_back() -> None:
        for node in written:
            opened = _open(node)
            opened.put([back.get(id(child), (None, child))[1] for child in opened.children])

    made = lent(tree)
    return made, give_back if written else None


class _Opened(NamedTuple):
    """What is in a container.

    Attributes:
      children: the contents.
      rebuild: makes one like it with other contents.
      keys: the places of the contents.
      write: puts something in such a place, or None where a container cannot change.
    """

    children: Sequence[Any]
    rebuild: Rebuild = list
    keys: Sequence[Any] = ()
    write: Write | None = None

    def put(self, values: Sequence[Any]) -> None:
        """Other contents."""
        assert self.write is not None
        for key, old, new in zip(self.keys, list(self.children), values, strict=True):
            if new is not old:
                self.write(key, new)


def _open(tree: Any) -> _Opened:
    kind = type(tree)
    if kind is tuple:
        return _Opened(tree, tuple)
    if kind is list:
        return _Opened(tree, list, range(len(tree)), tree.__setitem__)
    if kind is dict:
        return _Opened(
            list(tree.values()), lambda values: dict(zip(tree, values, strict=True)), list(tree), tree.__setitem__
        )
    if kind not in _CHANGE:
        children, spec = tree_flatten(tree, is_leaf=lambda x: x is not tree)
        if not spec.is_leaf():
            return _Opened(children, partial(tree_unflatten, treespec=spec))
    if is_dataclass(kind):
        names = [field.name for field in fields(tree) if hasattr(tree, field.name)]
        values = [getattr(tree, name) for name in names]
        return _Opened(values, partial(_with, tree, names, _set_field), names, partial(_set_field, tree))
    if isinstance(tree, dict):
        keys = list(tree)
        return _Opened(list(tree.values()), partial(_with, tree, keys, _set_item), keys, partial(_set_item, tree))
    if isinstance(tree, list | deque):
        keys = range(len(tree))
        return _Opened(tree, partial(_with, tree, keys, _set_item), keys, partial(_set_item, tree))
    if isinstance(tree, tuple):
        return _Opened(tree, partial(tuple.__new__, type(tree)))
    return _Opened(())


def _with(tree: Any, keys: Sequence[Any], write: Callable[[Any, Any, Any], None], values: list[Any]) -> Any:
    new = copy.copy(tree)
    for key, value in zip(keys, values, strict=True):
        write(new, key, value)
    return new


def _set_field(tree: Any, name: str, value: Any) -> None:
    object.__setattr__(tree, name, value)
    if isinstance(tree, dict) and name in tree:  # as Hugging Face's outputs, which are both
        dict.__setitem__(tree, name, value)


def _set_item(tree: Any, key: Any, value: Any) -> None:
    tree[key] = value
