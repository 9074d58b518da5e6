"""Masks, labels and factors by tensor, although several tensors may lie in one array.

A slab's array is an optimizer's leaf. Where all of its tensors are treated alike, so is the leaf, and optax's own
`masked` and `partition` do. Where they are not, values go by the row of the slab: a packed slab holds whole rows of
one tensor or of none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ..fsdp import Leaf, Leaves, leaves_of
from ..fsdp._check import is_traced
from ..fsdp._unit import pin
from ..layout import listed
from ._tensors import Rule, Tensor, chosen, decide, tensors_of

REMEDY = (
    "Give them different labels when the model is sharded (`label=`), so that they lie apart, or use the transforms "
    "of `ragged_jax.optim` (`partition`, `add_decayed_weights`, `scale_by_path`), which go by tensor."
)


def by_leaf(leaves: Leaves, value: Callable[[Tensor], Any]) -> list[list[Any]]:
    """For each leaf, a function's values of its tensors in order. Tensors of no element have no say."""
    found: list[list[tuple[int, Any]]] = [[] for _ in leaves]
    for tensor in tensors_of(leaves):
        found[tensor.leaf].append((tensor.numel, value(tensor)))
    firsts = [next((v for numel, v in own if numel), own[0][1] if own else None) for own in found]
    return [[v if numel else first for numel, v in own] for own, first in zip(found, firsts, strict=True)]


def agreed(leaves: Leaves, values: Sequence[Sequence[Any]]) -> list[Any]:
    """The value of each leaf, where its tensors agree.

    Raises:
      ValueError: some do not; every such slab is named, with its tensors.
    """
    torn, out = [], []
    names: list[list[str]] = by_leaf(leaves, lambda tensor: tensor.name)
    for leaf, mine, own in zip(leaves, values, names, strict=True):
        out.append(mine[0] if mine else None)
        if any(v != mine[0] for v in mine):
            groups: dict[Any, list[str]] = {}
            for name, value in zip(own, mine, strict=True):
                groups.setdefault(value, []).append(name)
            torn.append(f"{leaf.path}: " + "; ".join(f"{v!r} for {', '.join(n)}" for v, n in groups.items()))
    if torn:
        raise ValueError(
            "these arrays hold tensors that are to be treated differently:" + listed(torn) + f"\n{REMEDY}"
        )
    return out


def by_element(leaf: Leaf, values: Sequence[Any], padding: Any) -> Any:
    """What each element's tensor is given: one value, or an array that broadcasts against the leaf.

    Args:
      leaf: it.
      values: of its tensors, all of one type.
      padding: where no tensor lies, unless the tensors agree.
    """
    if leaf.of is None or len(leaf.of.slab.placements) == 1 or all(v == values[0] for v in values):
        return values[0]
    unit, slab = leaf.of.unit, leaf.of.slab
    starts, which = row_pieces(leaf)
    table = np.array([*values, padding])[which]
    lead, ndim = unit.stacked + bool(slab.split_axes and not slab.sole), len(leaf.shape)
    rows = jnp.arange(unit.share * slab.rows, dtype=jnp.int32)

    def on_device(starts: Any, table: Any) -> jax.Array:
        return table[jnp.searchsorted(starts, rows, side="right", method="compare_all") - 1]

    inside = unit.axis in jax.sharding.get_abstract_mesh().manual_axes
    if inside:
        at = lax.axis_index(unit.axis)
        given = on_device(jnp.asarray(starts)[at], jnp.asarray(table)[at])
    else:
        given = jax.vmap(on_device)(starts, table)
    given = given.reshape((1,) * lead + (-1,) + (1,) * (ndim - lead - 1))
    if is_traced(given) and not inside:
        spec: list[str | None] = [None] * ndim
        spec[lead] = unit.axis
        given = pin(given, jax.sharding.NamedSharding(unit.mesh, jax.sharding.PartitionSpec(*spec)))
    return given


def row_pieces(leaf: Leaf) -> tuple[np.ndarray, np.ndarray]:
    """Where in a device's rows of a slab a tensor starts, or padding does, and its number (-1: padding).

    Both int32 of shape [devices, pieces]. A whole slab may have more rows than an int32 counts.
    """
    unit, slab = leaf.of.unit, leaf.of.slab  # type: ignore
    ends = accumulate(unit.shares or (1,) * unit.num_shards, initial=0)
    table = []
    for first, last in pairwise(end * slab.rows for end in ends):
        pieces = {0: -1}
        for number, p in enumerate(slab.placements):
            low, high = max(p.offset // slab.width, first), min(p.stop // slab.width, last)
            if low < high:
                pieces |= {low - first: number, high - first: -1}
        table.append(list(pieces.items()))
    width = max(map(len, table))
    full = np.array([pieces + pieces[-1:] * (width - len(pieces)) for pieces in table], np.int32)
    return full[..., 0], full[..., 1]


def mask(rule: Any, like: Any = None) -> Callable[[Any], Any]:
    """A mask by the name and shape of tensors for `optax.masked` and the `mask=` of optax's optimizers.

    Args:
      rule: which tensors: a pattern of their path, several, a mapping from patterns to booleans, or a function of
        path and shape, both as the user wrote the model.
      like: parameters whose structure to know beforehand. By default those that the optimizer's `init` gets.

    Returns:
      A function from a tree to a tree of booleans, one for each array.

    Raises:
      ValueError: (when it is called) an array holds tensors of both kinds; all of them named.

    Example:
      >>> import jax.numpy as jnp
      >>> mask(lambda path, shape: len(shape) > 1)({"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)})
      {'bias': False, 'kernel': True}
    """
    return _ByTensor(lambda tensor: chosen(rule, tensor), like)


def labels(rule: Rule[str], like: Any = None) -> Callable[[Any], Any]:
    """Labels by the name and shape of tensors for `optax.partition`.

    Args:
      rule: a mapping from patterns of the path to labels, or a function of path and shape.
      like: as for `mask`.

    Returns:
      A function from a tree to a tree of labels.

    Raises:
      ValueError: (when it is called) tensors of one array have different labels, or one has none.
    """
    return _ByTensor(lambda tensor: _label(rule, tensor), like)


def _label(rule: Any, tensor: Tensor) -> str:
    label = decide(rule, tensor)
    if label is None:
        raise ValueError(f"{tensor.name} of shape {tensor.shape} has no label: no pattern of {list(rule)} matches it")
    return label


class _ByTensor:
    """A tree of values for a tree of arrays. An optimizer shows what its arrays are only in `init`: it remembers."""

    def __init__(self, value: Callable[[Tensor], Any], like: Any):
        self._value = value
        self._seen: dict[tuple, Leaves] = {}
        if like is not None:
            self(like)

    def __call__(self, tree: Any) -> Any:
        leaves = leaves_of(tree)
        key = tuple((leaf.path, leaf.shape) for leaf in leaves)
        if any(leaf.of for leaf in leaves) or not self._seen:
            self._seen[key] = leaves
        if key not in self._seen:
            if any(leaf.of for known in self._seen.values() for leaf in known):
                raise ValueError(
                    "this tree does not say what its arrays are, and is not one that was seen before: call the "
                    "optimizer's init with the model's parameters first, or give them as like="
                )
            self._seen[key] = leaves
        leaves = self._seen[key]
        return jax.tree.unflatten(jax.tree.structure(tree), agreed(leaves, by_leaf(leaves, self._value)))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Labels:
    """The label of each tensor. A pytree node without leaves.

    Attributes:
      of: `(tensor, label)` of all tensors.
    """

    of: tuple[tuple[str, str], ...]

    def tensors(self, label: str) -> frozenset[str]:
        """What has this label."""
        return frozenset(name for name, own in self.of if own == label)


class PartitionState(NamedTuple):
    """The state of `partition`.

    Attributes:
      inner: the state of each transform by label. Where tensors of several labels share an array, each has state
        for all of it, which is zero where others lie.
      leaves: what the parameters' arrays are; static.
      labels: of the tensors; static.
    """

    inner: dict[str, Any]
    leaves: Leaves
    labels: Labels


def partition(
    transforms: Mapping[str, optax.GradientTransformation], labels: Rule[str]
) -> optax.GradientTransformationExtraArgs:
    """`optax.partition` that goes by tensor, also where tensors of different labels share a slab.

    Each transform sees the arrays in which it has tensors, with zeros for the gradients of all others there. It must
    therefore treat elements or tensors one by one, not norms of the whole. In a shared slab every transform keeps
    state for all of it; `routing` says how much that is.

    Args:
      transforms: by label.
      labels: a mapping from patterns of the tensor's path to labels, or a function of path and shape.

    Raises:
      ValueError: (in `init`) a tensor has no label, or one without a transform; all of them named.
    """
    return partition_by(transforms, lambda tensor: _label(labels, tensor))


def partition_by(
    transforms: Mapping[str, optax.GradientTransformation], label_of: Callable[[Tensor], str]
) -> optax.GradientTransformationExtraArgs:
    """`partition` by a function of the tensor."""
    transforms = {label: optax.with_extra_args_support(tx) for label, tx in transforms.items()}

    def verdicts(leaves: Leaves) -> list[list[str]]:
        found = by_leaf(leaves, label_of)
        unknown = [f"{t.name}: {label_of(t)!r}" for t in tensors_of(leaves) if label_of(t) not in transforms]
        if unknown:
            raise ValueError(f"labels without a transform (there are {list(transforms)}): " + ", ".join(unknown))
        return found

    def part(tree: Any, found: list[list[str]], label: str, clear: Leaves | None = None) -> Any:
        """The tree with the arrays in which a label has tensors; with `clear`, zero where others lie."""
        values, treedef = jax.tree.flatten(tree)
        for i, mine in enumerate(found):
            if label not in mine:
                values[i] = optax.MaskedNode()
            elif (
                clear is not None
                and (own := by_element(clear.leaves[i], [m == label for m in mine], False)) is not True
            ):
                values[i] = jnp.where(own, values[i], jnp.zeros((), values[i].dtype))
        return jax.tree.unflatten(treedef, values)

    def init(params: Any) -> Any:
        leaves = leaves_of(params)
        found = verdicts(leaves)
        inner = {label: tx.init(part(params, found, label)) for label, tx in transforms.items()}
        labels = Labels(tuple((tensor.name, label_of(tensor)) for tensor in tensors_of(leaves)))
        return PartitionState(_as_sharded(inner, leaves), leaves, labels)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        leaves, (flat, treedef) = state.leaves, jax.tree.flatten(updates)
        found, inner, out = verdicts(leaves), {}, [[] for _ in flat]
        for label, tx in transforms.items():
            some = None if params is None else part(params, found, label)
            given, inner[label] = tx.update(part(updates, found, label, leaves), state.inner[label], some, **extra)
            each = iter(jax.tree.leaves(given))
            for i, mine in enumerate(found):
                if label in mine:
                    own = by_element(leaves.leaves[i], [m == label for m in mine], False)
                    out[i].append((own, next(each)))
        joined = [_join(parts) if parts else x for parts, x in zip(out, flat, strict=True)]
        return jax.tree.unflatten(treedef, joined), PartitionState(inner, leaves, state.labels)

    return optax.GradientTransformationExtraArgs(init, update)


def _as_sharded(state: Any, leaves: Leaves) -> Any:
    """A new state, under a trace, with its arrays of a slab's shape spread as it is: a compiler spreads none."""
    found = {}
    for leaf in leaves:
        if leaf.of is not None and leaf.shape == leaf.of.unit.shape(leaf.of.slab):  # not inside shard_map
            found.setdefault(leaf.shape, set()).add(leaf.of.unit.sharding(leaf.of.slab))
    known = {shape: next(iter(own)) for shape, own in found.items() if len(own) == 1}
    return jax.tree.map(lambda x: pin(x, known[x.shape]) if is_traced(x) and x.shape in known else x, state)


def _join(parts: list[tuple[Any, jax.Array]]) -> jax.Array:
    """Each part where it is meant for."""
    if parts[0][0] is True:
        return parts[0][1]
    whole = jnp.zeros_like(parts[0][1])
    for own, x in parts:
        whole = jnp.where(own, x, whole)
    return whole


class ByTensorState(NamedTuple):
    """What a transform without state of its own remembers.

    Attributes:
      leaves: what the parameters' arrays are.
    """

    leaves: Leaves


def remember(params: Any) -> Any:
    return ByTensorState(leaves_of(params))


def add_decayed_weights(weight_decay: Any, mask: Any = True) -> optax.GradientTransformation:
    """`optax.add_decayed_weights` with a mask by tensor, exact also where tensors share a slab.

    Args:
      weight_decay: the factor of the parameters that are added.
      mask: which tensors to decay, as for `ragged_jax.optim.mask`.
    """

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        if params is None:
            raise ValueError("weight decay needs the parameters: call update(grads, state, params)")
        found = by_leaf(state.leaves, lambda tensor: chosen(mask, tensor))
        decayed = [
            u if not any(own) else u + _where(by_element(leaf, own, False), weight_decay * p).astype(u.dtype)
            for u, p, leaf, own in zip(*map(jax.tree.leaves, (updates, params)), state.leaves, found, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(updates), decayed), state

    return optax.GradientTransformation(remember, update)


def scale_by_path(factors: Rule[float], default: float = 1.0) -> optax.GradientTransformation:
    """Multiplies updates by a factor for each tensor: learning rates by path.

    Args:
      factors: a mapping from patterns of the path to factors, or a function of path and shape.
      default: of tensors that no pattern matches.

    Example:
      >>> import jax.numpy as jnp
      >>> tx, params = scale_by_path({"embed*": 0.1}), {"embed": jnp.ones(1), "up": jnp.ones(1)}
      >>> float(tx.update(params, tx.init(params))[0]["up"][0])
      1.0
    """

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        found = by_leaf(state.leaves, lambda tensor: float(decide(factors, tensor, default)))
        scaled = [
            u if not own else u * jnp.asarray(by_element(leaf, own, default)).astype(u.dtype)
            for u, leaf, own in zip(jax.tree.leaves(updates), state.leaves, found, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(updates), scaled), state

    return optax.GradientTransformation(remember, update)


def _where(own: Any, x: jax.Array) -> jax.Array:
    return x if own is True else jnp.where(own, x, jnp.zeros((), x.dtype))
