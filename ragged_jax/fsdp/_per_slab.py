"""A function of every shard of some slabs, with the tensors in it told apart from the padding."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from ..layout import listed
from ._check import has_values, is_traced
from ._leaves import Leaf, SlabOf, leaves_of
from ._splits import splitting_axes
from ._unit import pin


@singledispatch
def params_in(model: Any) -> Any:
    """The tree of a model's parameters: a module's state of them; anything else is such a tree."""
    return model


def slabs_and_others(tree: Any, like: Any) -> tuple[list[tuple[SlabOf, jax.Array]], list[tuple[Leaf, jax.Array]]]:
    """The leaves of a tree by what they are.

    Raises:
      ValueError: two leaves hold a tensor of the same name, as in an optimizer's state; or `like` has other leaves.
    """
    arrays, leaves = jax.tree.leaves(params_in(tree)), list(leaves_of(params_in(tree if like is None else like)))
    if len(arrays) != len(leaves):
        raise ValueError(f"the tree has {len(arrays)} leaves, the one that it should be like has {len(leaves)}")
    pairs = list(zip(leaves, arrays, strict=True))
    if wrong := [f"{a.path}: {jnp.shape(x)}, expected {a.shape}" for a, x in pairs if jnp.shape(x) != a.shape]:
        raise ValueError("these leaves are not those of the model:" + listed(wrong))
    slabs = [(leaf.of, x) for leaf, x in pairs if leaf.of is not None]
    others = [(leaf, x) for leaf, x in pairs if leaf.of is None]
    names = Counter(p.tensor.name for of, _ in slabs for p in of.slab.placements) + Counter(
        leaf.path for leaf, _ in others
    )
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise ValueError(f"several leaves hold {', '.join(twice)}; give parameters or gradients of one model")
    return slabs, others


def on_shards(
    function: Callable[[Sequence[tuple[SlabOf, jax.Array]]], Any],
    slabs: Sequence[tuple[SlabOf, jax.Array]],
    out_spec: PartitionSpec,
) -> Any:
    """Calls a function inside `shard_map` with this device's part of each slab, under jit in any case.

    The axes that split tensors are manual there, too.
    """
    units = [of.unit for of, _ in slabs]
    mesh, arrays = units[0].mesh, [x for _, x in slabs]
    has_values(arrays)
    axes = {*units[0].axes, *splitting_axes(of.slab for of, _ in slabs)}
    shardings = [of.unit.sharding(of.slab) for of, _ in slabs]

    def local(*shards: jax.Array) -> Any:
        return function([(of, shard) for (of, _), shard in zip(slabs, shards, strict=True)])

    run = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(s.spec for s in shardings), out_specs=out_spec, axis_names=axes
    )
    if not any(is_traced(x) for x in arrays):
        return jax.jit(run)(*(jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)))
    if AxisType.Explicit in mesh.axis_types:
        arrays = [pin(x, s) for x, s in zip(arrays, shardings, strict=True)]
    return run(*arrays)


def tensors_on_shard(of: SlabOf, shard: jax.Array) -> Iterator[tuple[str, jax.Array, jax.Array]]:
    """Inside: by tensor of a slab, the shard as `[layers, rows, width]` and which of its rows are the tensor's."""
    unit, slab = of.unit, of.slab
    copies, num_rows = unit.bucket.num_copies, slab.rows * unit.share
    shard = shard.reshape(copies, num_rows, slab.width)
    bounds = np.array([unit._bounds(slab, k) for k in range(unit.num_shards)], np.int64) // slab.width
    row, k = jnp.arange(num_rows), lax.axis_index(unit.axis)
    for placement in slab.placements:
        # In rows of each device's shard, so that 32 bits are enough.
        start = np.maximum(placement.offset // slab.width - bounds[:, 0], 0)
        stop = np.minimum(placement.stop // slab.width, bounds[:, 1]) - bounds[:, 0]
        low, high = (jnp.asarray(np.clip(x, 0, num_rows).astype(np.int32))[k] for x in (start, stop))
        yield placement.tensor.name, shard, (row >= low) & (row < high)
