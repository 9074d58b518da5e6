"""Deferred initialisation: parameters are born as shards, with the bits that an unsharded init gives them.

Two things stand between a sharded init and the eager one. In one jitted program XLA merges what was computed step by
step: the sqrt(2) of a normal distribution with the scale that follows it, or a product with the sum that follows. The
last bit moves. And what does not divide, or is cut where its slab is, would be computed whole on every device. So the
init runs here as it does eagerly, one compiled operation after another, but each result of some size is spread over
the devices: cut along one of its dims, which is padded where it does not divide.

Random bits that do not depend on how they are sharded are jax's default (`jax_threefry_partitionable`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..layout import Slab
from ._check import is_key
from ._scatter import scattered
from ._slabs import slab_of
from ._unit import Arrays, Unit

SMALL_NBYTES = 1 << 16  # smaller results are whole on every device
Make = Callable[[], tuple[Mapping[str, Any], Any]]


def create(
    make: Make, units: Sequence[Unit], watch: Callable[[Any], None] = lambda compiled: None
) -> tuple[dict[str, Arrays], Any]:
    """Runs an init and gives its tensors as slabs.

    No device and no host holds a whole tensor of 64 KiB or more, unless an operation needs all of it to make any of
    it, as the QR decomposition in `orthogonal` does: that is computed whole, on every device.

    Args:
      make: a function of no arguments, traceable, that returns the tensors by name and a pytree of other arrays.
      units: the buckets of all tensors, on one mesh.
      watch: called with every compiled program.

    Returns:
      The slabs, by name of the bucket and of the slab, and the other arrays, replicated. They equal bit for bit what
      `make()` gives outside of jit, on any number of devices.
    """
    machine = _Machine(units, watch)
    with jax.set_mesh(machine.mesh):
        tensors, rest = machine.evaluate(make)
        slabs = {
            unit.bucket.name: {
                slab.name: _relabelled(
                    machine.own(machine.pack(unit, slab, [tensors.pop(p.tensor.name) for p in slab.placements])),
                    unit.sharding(slab),
                )
                for slab in unit.bucket.slabs
            }
            for unit in units
        }
        everywhere = NamedSharding(units[0].mesh, PartitionSpec())
        return slabs, jax.tree.map(lambda x: _relabelled(machine.gathered(x).copy(), everywhere), rest)


@dataclass(frozen=True)
class _Spread:
    """A value on its way, truly of `shape`; `array` is cut along `dim`, where it may be padded, or (None) whole."""

    array: jax.Array
    shape: tuple[int, ...]
    dim: int | None

    @property
    def form(self) -> tuple:
        return self.shape, self.array.dtype, self.dim


class _Machine:
    """Runs operations one by one on all devices, each compiled once for each kind of input."""

    def __init__(self, units: Sequence[Unit], watch: Callable[[Any], None]):
        mesh = units[0].mesh
        # Axes of type `Explicit` would keep whole what nobody said to shard.
        self.mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        self.axis, self.num_shards = units[0].axis, units[0].num_shards
        self.stacks = {unit.bucket.stack for unit in units} - {None}
        self.watch, self.programs, self.owned = watch, {}, {}

    def evaluate(self, function: Callable[[], Any]) -> Any:
        """What the function returns, with a `_Spread` for each array."""
        closed, shapes = jax.make_jaxpr(function, return_shape=True)()
        jaxpr = closed.jaxpr
        values = {v: self._given(c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
        last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, Literal)}
        last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}

        def read(v: Any) -> _Spread:
            return self._given(np.asarray(v.val, v.aval.dtype)) if isinstance(v, Literal) else values[v]  # type: ignore

        for i, eqn in enumerate(jaxpr.eqns):
            inputs = [read(v) for v in eqn.invars]
            outputs = self.run((eqn.primitive, _hashable(eqn.params)), _operation(eqn), inputs)
            values.update((v, x) for v, x in zip(eqn.outvars, outputs, strict=True) if v in last)
            for v in {v for v in eqn.invars if not isinstance(v, Literal)}:
                if last[v] == i:
                    del values[v]
            del inputs, outputs
        return jax.tree.unflatten(jax.tree.structure(shapes), [read(v) for v in jaxpr.outvars])

    def pack(self, unit: Unit, slab: Slab, parts: list[_Spread]) -> jax.Array:
        """The array of a slab from its tensors."""
        lead, shares = int(unit.stacked), unit.shares
        if slab.split_axes:
            return self._pack_slices(unit, slab, parts)
        if slab.sole and shares is None and slab.placements[0].axis_order is None and parts[0].dim == lead:
            return parts[0].array
        names = {p.tensor.name: str(i) for i, p in enumerate(slab.placements)}
        placements = tuple(
            replace(p, tensor=replace(p.tensor, name=names[p.tensor.name])) for p in slab.placements
        )  # so that equal layers share a program
        nameless = replace(slab, name="", placements=placements)

        def packed(*tensors: jax.Array) -> jax.Array:
            if slab.sole:
                return slab_of(nameless, {"0": tensors[0]}, self.num_shards, shares, lead)
            return scattered(nameless, tensors, self.mesh, self.axis, shares, lead)

        (out,) = self.run(("pack", nameless, lead, shares), packed, parts, [lead])
        return out.array

    def _pack_slices(self, unit: Unit, slab: Slab, parts: list[_Spread]) -> jax.Array:
        names = [p.tensor.name for p in slab.placements]

        def packed(*arrays: jax.Array) -> jax.Array:
            tensors = (self._open(a, x) for a, x in zip(arrays, parts, strict=True))
            return unit.packed(slab, dict(zip(names, tensors, strict=True)))

        jitted = jax.jit(packed, out_shardings=NamedSharding(self.mesh, unit.spec(slab)))
        compiled = jitted.lower(*(x.array for x in parts)).compile()
        self.watch(compiled)
        return compiled(*(x.array for x in parts))

    def own(self, x: jax.Array) -> jax.Array:
        """An array in memory of its own, although it may be the value of several tensors: steps donate each."""
        x = x.copy() if id(x) in self.owned else x
        self.owned[id(x)] = x
        return x

    def gathered(self, x: _Spread) -> jax.Array:
        """The whole array on every device."""
        if x.dim is None:
            return x.array
        (out,) = self.run("gather", lambda array: array, [x], [None])
        return out.array

    def run(self, name: Any, function: Callable, inputs: list[_Spread], dims: list[int | None] | None = None) -> list:
        """Calls a function on spread values; its results are cut along `dims`, or where they are best cut."""
        key = (name, tuple(x.form for x in inputs))
        if key not in self.programs:
            self.programs[key] = self._compile(function, inputs, dims)
        compiled, forms = self.programs[key]
        return [_Spread(x, *form) for x, form in zip(compiled(*(x.array for x in inputs)), forms, strict=True)]

    def _compile(self, function: Callable, inputs: list[_Spread], dims: list[int | None] | None) -> tuple[Any, list]:
        def results(*values: jax.Array) -> list[jax.Array]:
            out = function(*values)
            return list(out) if isinstance(out, list | tuple) else [out]

        true = [jax.ShapeDtypeStruct(x.shape, x.array.dtype) for x in inputs]
        outputs = jax.eval_shape(results, *true)
        chosen = [self._best_dim(x) for x in outputs] if dims is None else dims

        def program(*arrays: jax.Array) -> list[jax.Array]:
            out = results(*(self._open(a, x) for a, x in zip(arrays, inputs, strict=True)))
            return [self._padded(x, dim) for x, dim in zip(out, chosen, strict=True)]

        jitted = jax.jit(
            program,
            in_shardings=[self._sharding(x.array, x.dim) for x in inputs],
            out_shardings=[self._sharding(x, dim) for x, dim in zip(outputs, chosen, strict=True)],
        )
        compiled = jitted.lower(*(x.array for x in inputs)).compile()
        self.watch(compiled)
        return compiled, [(x.shape, dim) for x, dim in zip(outputs, chosen, strict=True)]

    def _given(self, x: Any) -> _Spread:
        return _Spread(jax.device_put(x, NamedSharding(self.mesh, PartitionSpec())), jnp.shape(x), None)

    def _best_dim(self, x: Any) -> int | None:
        """The dim that slabs are cut along, if it is long enough to be cut without much padding."""
        if is_key(x) or x.size * x.dtype.itemsize < SMALL_NBYTES:
            return None
        first = int(x.ndim > 1 and x.shape[0] in self.stacks)
        if x.shape[first] % self.num_shards == 0 or x.shape[first] >= 8 * self.num_shards:
            return first
        return max(range(x.ndim), key=lambda dim: (x.shape[dim] % self.num_shards == 0, x.shape[dim]))

    def _sharding(self, x: Any, dim: int | None) -> NamedSharding:
        spec = [None] * x.ndim
        if dim is not None:
            spec[dim] = self.axis
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def _padded(self, x: jax.Array, dim: int | None) -> jax.Array:
        if dim is None or not (missing := -x.shape[dim] % self.num_shards):
            return x
        return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])

    def _open(self, array: jax.Array, x: _Spread) -> jax.Array:
        if x.dim is None or array.shape == x.shape:
            return array
        # The compiler can cut what does not divide, as an array that passes between programs cannot be.
        cut = jax.lax.slice_in_dim(array, 0, x.shape[x.dim], axis=x.dim)
        return jax.lax.with_sharding_constraint(cut, self._sharding(cut, x.dim))


def _operation(eqn: Any) -> Callable:
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # jax before 0.10 gives both
    return lambda *values: eqn.primitive.bind(*functions, *values, **params)


def _hashable(params: Mapping[str, Any]) -> Any:
    """The parameters of an operation as a key, or one that equals no other."""
    key = tuple(sorted(params.items()))
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def _relabelled(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same buffers as an array of the user's mesh."""
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [s.data for s in x.addressable_shards])
