"""The parts of a sharded model: each bucket with its arrays and what its adapter knows of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import singledispatch
from typing import Any

import jax

from ._generic import _unknown
from ._sharded_tree import ShardedTree
from ._unit import Unit


@dataclass(frozen=True)
class Part:
    """A bucket of a model.

    Attributes:
      unit: the bucket on its mesh.
      slabs: its arrays by name.
      aliases: by tensor, the other names that it has; only those that have some.
      reshard: whether gathered weights are dropped after the forward pass; None where the caller decides.
    """

    unit: Unit
    slabs: Mapping[str, jax.Array]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reshard: bool | None = None


@singledispatch
def parts_of(model: Any) -> list[Part]:
    """The buckets of a sharded model with their arrays, the root first."""
    raise _unknown(model)


@parts_of.register
def _(model: ShardedTree) -> list[Part]:
    kept = False if model.unit.bucket.name == "" else None  # the root is gathered at the start of a step
    return [
        Part(model.unit, model.slabs, reshard=kept),
        *(part for c in model.children.values() for part in parts_of(c)),
    ]


def names_in(parts: list[Part]) -> dict[str, tuple[Part, str]]:
    """Every name that a tensor goes by, with the part that holds it and its name there."""
    names = {}
    for part in parts:
        held = (slab for slab in part.unit.bucket.slabs if part.slabs[slab.name] is not None)  # see `partition`
        for tensor in (p.tensor for slab in held for p in slab.placements):
            names |= dict.fromkeys((tensor.name, *part.aliases.get(tensor.name, ())), (part, tensor.name))
    return names


def matching(pattern: str, names: Mapping[str, Any]) -> list[str]:
    """The names that a pattern means: itself, or those that it matches.

    Raises:
      KeyError: it matches none; the message lists near ones.
    """
    if found := [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]:
        return found
    near = get_close_matches(pattern, names, 3, cutoff=0.4) or list(names)[:3]
    raise KeyError(f"no tensor is called or matches {pattern!r}; there are {', '.join(near)} and others")
