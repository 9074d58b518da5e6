"""Slabs whose tensors other mesh axes split (tensor and expert parallelism): one for each slice, side by side.

At rest a packed slab gets a leading dim over those axes, and a sole slab keeps its tensor's shape with both
shardings, such as `P("fsdp", "tp")` or `P(("tp", "fsdp"), None)`. A dim that both kinds of axes cut cannot enter
`shard_map`, which wants its own axes outermost; it enters as two dims.

XLA replicates what a collective over some axes reads along all others, so inside a slice is handled by a `shard_map`
of its own (`on_slices`): its gather moves the slice, never the tensor.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..layout import Placement, Slab, Split, named

Names = tuple[str, ...]


def entries(spec: PartitionSpec) -> list[Names]:
    """The mesh axes of each dim."""
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]


def spec_of(names: Sequence[Names]) -> PartitionSpec:
    """The inverse of `entries`, in the form in which XLA gives specs back."""
    return PartitionSpec(*(e[0] if len(e) == 1 else e or None for e in names))


def opened_spec(spec: PartitionSpec, axes: Names) -> PartitionSpec:
    """The spec inside: a dim that `axes` and others cut is two dims there."""
    dims: list[Names] = []
    for names in entries(spec):
        mine, others = tuple(n for n in names if n in axes), tuple(n for n in names if n not in axes)
        dims += [others, mine] if mine and others else [names]
    return spec_of(dims)


def only(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """Of a spec, what it says about some axes."""
    return spec_of([tuple(n for n in names if n in axes) for names in entries(spec)])


def others(spec: PartitionSpec, axes: Sequence[str]) -> Names:
    """The axes in a spec that are not among `axes`."""
    return tuple(n for names in entries(spec) for n in names if n not in axes)


def opened(x: Any, spec: PartitionSpec, axes: Names, mesh: Any) -> Any:
    """An array at rest as it enters `shard_map` over `axes`."""
    shape: list[int] = []
    for size, names in zip(x.shape, entries(spec), strict=False):
        rest = [mesh.shape[n] for n in names if n not in axes]
        shape += [math.prod(rest), size // math.prod(rest)] if rest and len(rest) < len(names) else [size]
    if len(shape) == len(spec):
        return x
    sharding = NamedSharding(mesh, opened_spec(spec, axes))
    return jax.lax.with_sharding_constraint(x.reshape(shape), sharding)


def closed(x: Any, shape: tuple[int, ...], spec: PartitionSpec, axes: Names, mesh: Any) -> Any:
    """The inverse of `opened`."""
    if not others(spec, axes):
        return x
    return jax.lax.with_sharding_constraint(x.reshape(shape), NamedSharding(mesh, spec))


def on_slices(body: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`body` on each slice by itself, inside the `shard_map` over the batch axes.

    All other axes of the mesh are manual inside, also those that split nothing. Otherwise jax puts a sharding
    constraint into the reduction of a collective, and XLA:CPU ends the process over one of bfloat16.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not (names := set(mesh.axis_names) - set(mesh.manual_axes)):
        return body
    return jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=True)


def other_axes(slab: Slab) -> Names:
    """The axes that split a slab's tensors, in the order in which its slices lie."""
    return tuple(axis for axis, _ in slab.split_axes)


def splitting_axes(slabs: Iterable[Slab]) -> Names:
    """The axes that split tensors of any of the slabs."""
    return tuple(sorted({axis for slab in slabs for axis in other_axes(slab)}))


def once(x: jax.Array, slab: Slab, axes: Names, otherwise: Any = 0) -> jax.Array:
    """Where all of `axes` are manual, what a slab gives on the first of the devices that hold the same of it."""
    copies = tuple(axis for axis in axes if axis not in other_axes(slab))
    return jax.numpy.where(jax.lax.axis_index(copies) == 0, x, otherwise) if copies else x


def stored_splits(placement: Placement) -> tuple[Split, ...]:
    """The splits of a tensor, by the dims in which it is stored."""
    order = placement.axis_order
    splits = placement.tensor.splits
    return splits if order is None else tuple(Split(order.index(s.dim), s.size, s.axis) for s in splits)


def dim_splits(splits: Sequence[Split], dim: int) -> list[Split]:
    return [split for split in splits if split.dim == dim]


def tensor_spec(splits: Sequence[Split], num_dims: int) -> PartitionSpec:
    """How a whole tensor is laid out over the other axes."""
    return spec_of([tuple(s.axis for s in dim_splits(splits, dim)) for dim in range(num_dims)])


def slices(x: Any, splits: Sequence[Split], lead: int) -> Any:
    """A tensor's slices on a new dim behind the `lead` leading ones, by the axes' names."""
    shape, places = list(x.shape[:lead]), {}
    for dim, size in enumerate(x.shape[lead:]):
        for split in (here := dim_splits(splits, dim)):
            places[split.axis] = len(shape)
            shape.append(split.size)
        shape.append(size // math.prod(s.size for s in here))
    front = [places[axis] for axis in sorted(places)]
    order = [*range(lead), *front, *(d for d in range(lead, len(shape)) if d not in front)]
    cut, behind = x.reshape(shape).transpose(order), lead + len(front)
    return cut.reshape(*cut.shape[:lead], math.prod(cut.shape[lead:behind]), *cut.shape[behind:])


def joined(x: Any, splits: Sequence[Split], lead: int) -> Any:
    """The inverse of `slices`."""
    by_name = sorted(splits, key=lambda split: split.axis)
    outer, inner = x.shape[:lead], x.shape[lead + 1 :]
    cut = x.reshape(*outer, *(s.size for s in by_name), *inner)
    order, shape = [*range(lead)], [*outer]
    for dim, size in enumerate(inner):
        here = dim_splits(splits, dim)
        order += [lead + by_name.index(split) for split in here] + [lead + len(splits) + dim]
        shape.append(size * math.prod(s.size for s in here))
    return cut.transpose(order).reshape(shape)


def auto(function: Callable, names: Sequence[str], mesh: Mesh, out_specs: Any) -> Callable:
    """`function` with `Explicit` axes made `Auto` inside, where tensors are split over any of them.

    The types of `Explicit` axes do not survive `shard_map` over others: what enters is gathered over them.
    """
    explicit = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    if not (chosen := [n for n in explicit if n in names]):
        return function
    if jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            f"tensors are split over the mesh axes {', '.join(chosen)}, which are Explicit; this needs the mesh as "
            "context: call `jax.set_mesh(mesh)` once, or make these axes `AxisType.Auto`"
        )
    return jax.sharding.auto_axes(function, axes=tuple(explicit), out_sharding=out_specs)


def not_split(slabs: Sequence[Slab], what: str) -> None:
    """Raises NotImplementedError when other mesh axes split tensors, with all their names."""
    if names := [p.tensor.name for slab in slabs for p in slab.placements if p.tensor.splits]:
        raise NotImplementedError(
            f"{what} cannot yet deal with tensors that are split over other mesh axes: {named(names)}; "
            "`full_params` gives them whole"
        )
