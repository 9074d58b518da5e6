"""Checks of what users pass in; each error names every bad leaf by its path, the sizes and the remedy."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from .._warned import warn
from ..layout import TensorSpec, listed, named
from ..planner import Group


def mesh_axes(mesh: Mesh, axis: str | tuple[str, ...]) -> tuple[str, ...]:
    """`axis` as a tuple of mesh axes: replicated over all but the last, sharded over the last.

    Raises:
      ValueError: an axis that the mesh lacks, or one that is named twice.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    unknown = [name for name in axes if name not in mesh.shape]
    if unknown or not axes:
        raise ValueError(f"axis {unknown or axis!r} is not an axis of the mesh, which has {dict(mesh.shape)}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis {axes} names a mesh axis twice; each can shard or replicate once")
    return axes


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_traced(leaf: Any) -> bool:
    return isinstance(leaf, Tracer)


def canonical_dtype(leaf: Any) -> np.dtype:
    """What JAX makes of an array's dtype: 64 bits become 32 unless they are enabled."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct) and not (
        isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and is_key(leaf)
    )


def distinct(names: Sequence[str]) -> None:
    """Raises ValueError when two leaves have the same path, as `{"a/b": x}` and `{"a": {"b": x}}` do."""
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"paths must be unique, keys with a slash make these ambiguous: {named(repeated)}")


def patterns_match(option: str, rule: Any, names: Sequence[str]) -> None:
    """Raises ValueError for patterns of a mapping that match none of the names: a typo would go unnoticed."""
    idle = [p for p in rule if not any(fnmatchcase(name, p) for name in names)] if isinstance(rule, Mapping) else []
    if idle:
        listing = named(map(repr, names))
        raise ValueError(
            f"{option}: the patterns {', '.join(map(repr, idle))} match nothing; the names are {listing}"
        )


def block_patterns(rule: Any, groups: Iterable[Group]) -> None:
    """The same for a rule that gives tensors their blocks."""
    patterns_match("block", rule, [tensor.name for group in groups for tensor in group.tensors])


def has_values(leaves: Iterable[Any]) -> None:
    """Raises ValueError when a model has shapes only, as one made by `nnx.eval_shape` has until it is loaded."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError(
            "this model has shapes and no values yet; `rj.Checkpointer(path).restore`, `rj.load_huggingface` and "
            "`rj.load_orbax` return it with values"
        )


def arrays_only(leaves: Mapping[str, Any]) -> None:
    """Raises TypeError when a leaf that should be sharded is not a numeric array."""
    bad = [f"{name}: {_describe(leaf)}" for name, leaf in leaves.items() if not is_array(leaf)]
    if bad:
        raise TypeError(
            "only numeric arrays can be sharded; these leaves are something else:"
            + listed(bad)
            + "\nKeep them out of the tree (pass them beside it), or make them arrays."
        )


def _describe(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None)
    return f"{type(leaf).__name__} of dtype {dtype}" if dtype is not None else f"{type(leaf).__name__} {leaf!r:.40}"


def blocks_fit(tensors: Iterable[TensorSpec]) -> None:
    """Warns, once for all of them, of tensors that hold no block of the size asked for."""
    small = [
        f"{t.name}: shape {t.shape}, block {t.block!r}"
        for t in tensors
        if t.block.kind != "elements" and not t.block.fits(t.shape)  # fewer elements than a block are one block
    ]
    if small:
        warn(
            "these tensors are smaller than one block; a smaller block was used, as large as the tensor allows, "
            "so that each dim that the block exceeds stays whole:" + listed(small)
        )


def batch_divides(
    leaves: Iterable[tuple[str, Any]], num_devices: int, axes: tuple[str, ...], num_microbatches: int = 1
) -> None:
    """Raises ValueError when dim 0 of a batch leaf does not divide over the devices and microbatches."""
    bad = [
        f"{name}: shape {x.shape}{', a random key without a type?' * may_be_key(x)}"
        for name, x in leaves
        if x.shape[0] % (num_devices * num_microbatches)
    ]
    if bad:
        parts = f", and on each into {num_microbatches} microbatches" if num_microbatches > 1 else ""
        raise ValueError(
            f"dim 0 of a batch is split over {num_devices} devices (mesh axes {', '.join(axes)}){parts}, and these "
            "do not divide:"
            + listed(bad)
            + "\nPad the batch (and give padded examples weight 0, dividing by the mean weight over all devices: "
            "`lax.pmean(weights.sum(), axis)`), drop the rest, or wrap an argument that every "
            "device needs whole in `rj.replicated`." + f"\n{KEYS}" * any("random key" in line for line in bad)
        )


KEYS = (
    "A random key passes whole, and differs by device, when it is made by `jax.random.key`, or by "
    "`jax.random.wrap_key_data` of one without a type."
)


def may_be_key(x: Any) -> bool:
    """Whether these could be the data of a random key as `jax.random.PRNGKey` makes it."""
    return x.dtype == np.uint32 and x.shape == jax.eval_shape(jax.random.PRNGKey, 0).shape
