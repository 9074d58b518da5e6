"""How the dims of one tensor become those of another: `in heads features -> (heads features) in`.

The notation is that of einops (Rogozhnikov, ICLR 2022): names in order, parentheses around dims that are one dim.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|[()])")

Shape = tuple[int, ...]
Groups = tuple[tuple[str, ...], ...]


class Link(NamedTuple):
    """How a source tensor, or a slice of it, lies in a target tensor, or in a slice of it.

    Both are seen with dims that are finer than their own: `source_dims` and `target_dims`, sizes whose products are
    the shapes. Where an index is given, only that slice of the dim takes part; what is left are the same dims on
    both sides, in another order.

    Attributes:
      source: the source tensor's name.
      source_dims, target_dims: sizes of the fine dims.
      source_index, target_index: for each of them, the slice that takes part, or None for all.
      axes: the source's dims that take part, counted among themselves, in the target's order.
    """

    source: str
    source_dims: Shape
    source_index: tuple[int | None, ...]
    target_dims: Shape
    target_index: tuple[int | None, ...]
    axes: tuple[int, ...]

    def take(self, source: Any) -> Any:
        """What the target gets of a source array (numpy or jax), with the target's fine dims."""
        return source.reshape(self.source_dims)[_slices(self.source_index)].transpose(self.axes)

    def put(self, part: Any, target: Any) -> None:
        """Writes what `take` gave to its place in a contiguous numpy array."""
        target.reshape(self.target_dims)[_slices(self.target_index)] = part

    def permuted(self, shape: Shape, order: Sequence[int]) -> "Link":
        """The same with the target's dims in another order.

        Args:
          shape: the target's.
          order: its dims as they come then.
        """
        fine = iter(range(len(self.target_dims)))
        groups = []
        for size in shape:  # dims of size 1 may fall to either neighbour: they move nothing
            group, product = [], 1
            while product < size:
                group.append(next(fine))
                product *= self.target_dims[group[-1]]
            groups.append(group)
        groups.append(list(fine))
        dims = [at for dim in (*order, len(shape)) for at in groups[dim]]
        left = [at for at, index in enumerate(self.target_index) if index is None]
        return self._replace(
            target_dims=tuple(self.target_dims[at] for at in dims),
            target_index=tuple(self.target_index[at] for at in dims),
            axes=tuple(self.axes[left.index(at)] for at in dims if at in left),
        )


def _slices(index: tuple[int | None, ...]) -> tuple[int | slice, ...]:
    return tuple(slice(None) if at is None else at for at in index)


@dataclass(frozen=True)
class Dims:
    """Both sides of a dims expression.

    Attributes:
      source, target: for each dim of the tensor, the names of the fine dims that make it up.

    Example:
      >>> Dims.parse("in out -> out in")
      Dims(source=(('in',), ('out',)), target=(('out',), ('in',)))
    """

    source: Groups
    target: Groups

    @classmethod
    def parse(cls, text: str) -> "Dims":
        """Raises ValueError for what is no such expression."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ValueError(f"dims {text!r} have no '->'")
        return cls(_groups(left), _groups(right))

    @property
    def inverse(self) -> "Dims":
        return Dims(self.target, self.source)

    def __str__(self):
        return f"{_text(self.source)} -> {_text(self.target)}"

    def solve(self, known: Mapping[str, int], source: Shape, target: Shape | None) -> dict[str, int]:
        """The size of every fine dim.

        Args:
          known: sizes that are known beforehand.
          source: the source's shape.
          target: the target's, if it is known.

        Raises:
          ValueError: the shapes do not fit, or leave a size open.
        """
        sizes = {name: known[name] for group in (*self.source, *self.target) for name in group if name in known}
        sides = [(self.source, source), *([(self.target, target)] if target is not None else [])]
        for groups, shape in sides:
            if len(groups) != len(shape):
                raise ValueError(f"shape {shape} has not the {len(groups)} dims of `{_text(groups)}`")
        pairs = [pair for groups, shape in sides for pair in zip(groups, shape, strict=True)]
        for _ in range(1 + len(pairs)):
            for group, size in pairs:
                _solve_group(group, size, sizes)
        for group, size in pairs:
            if opened := [name for name in group if name not in sizes]:
                which = f"{' and '.join(opened)} of `{_text((group,))}` are; say so in `sizes`"
                raise ValueError(f"{size} leaves open how large {which}")
            if (got := math.prod(sizes[name] for name in group)) != size:
                said = " * ".join(f"{name} {sizes[name]}" for name in group) or "1"
                raise ValueError(f"a dim of {size} should be {said}{f' = {got}' * (len(group) > 1)}")
        return sizes

    def link(self, name: str, sizes: Mapping[str, int], source: Mapping[str, int], target: Mapping[str, int]) -> Link:
        """The link of a source to a target.

        Args:
          name: of the source.
          sizes: of the fine dims.
          source, target: the slices of fine dims that take part.
        """
        here, there = _flat(self.source), _flat(self.target)
        left = [dim for dim in here if dim not in source]
        return Link(
            name,
            tuple(sizes[dim] for dim in here),
            tuple(source.get(dim) for dim in here),
            tuple(sizes[dim] for dim in there),
            tuple(target.get(dim) for dim in there),
            tuple(left.index(dim) for dim in there if dim not in target),
        )

    def target_shape(self, sizes: Mapping[str, int]) -> Shape:
        return tuple(math.prod(sizes[name] for name in group) for group in self.target)


def same(ndim: int) -> Dims:
    """The dims of a tensor that stays as it is."""
    names = tuple((f"_{dim}",) for dim in range(ndim))
    return Dims(names, names)


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def _solve_group(group: tuple[str, ...], size: int, sizes: dict[str, int]) -> None:
    opened = [name for name in group if name not in sizes]
    known = math.prod(sizes[name] for name in group if name in sizes)
    if len(opened) == 1 and known and size % known == 0:
        sizes[opened[0]] = size // known


def _groups(text: str) -> Groups:
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    at = 0
    while at < len(text.rstrip()):
        if (token := _TOKEN.match(text, at)) is None:
            raise ValueError(f"dims {text.strip()!r}: {text[at:].strip()!r} is neither a name nor a parenthesis")
        at, word = token.end(), token[1]
        if word in "()":
            if (word == "(") != (inside is None):
                raise ValueError(f"dims {text.strip()!r}: the parentheses do not match")
            if inside is not None:
                groups.append(tuple(inside))
            inside = [] if word == "(" else None
        elif inside is not None:
            inside.append(word)
        else:
            groups.append((word,))
    if inside is not None:
        raise ValueError(f"dims {text.strip()!r}: the parentheses do not match")
    if len(set(_flat(groups))) < len(_flat(groups)):
        raise ValueError(f"dims {text.strip()!r} name one twice")
    return tuple(groups)


def _flat(groups: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(name for group in groups for name in group)


def _text(groups: Groups) -> str:
    return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)


def names_of(groups: Groups) -> set[str]:
    """The fine dims of one side."""
    return set(_flat(groups))
