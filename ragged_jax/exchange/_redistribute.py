"""`redistribute`: a state of one layout as a state of another one, without leaving the devices."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..fsdp import array_from_parts, relaid
from ..fsdp._check import has_values, is_traced
from ..layout import Layout, Segment, itemsize
from ._by_host import array_by_host, value_by_host
from ._holding import HERE, Index
from ._matched import Source, matched
from ._places import is_alike, is_sliced_alike, placement_of, run_numel, segments_in, slice_of
from ._program import AXIS, Program, compiled, mesh_of, plan_program
from ._state import PYTHON, Item, is_key, items_of, sharding_of

T = TypeVar("T")
_MANY_RUNS = 1 << 16


def redistribute(state: Any, like: Any, *, donate: bool = False, mesh: Mesh | None = None) -> Any:
    """Moves a state to another layout, other devices or other shardings; the numbers are the same bits.

    What each device lacks is sent to it by those that have it, in the rounds of the planner's exchange schedule; no
    array is gathered. One array is made at a time, so that beside the two states a device needs memory for a part of
    a bucket only. A second move between the same layouts compiles nothing.

    Tensors go by their names, as in a checkpoint: sharded models and what mirrors them in an optimizer's state
    (moments, 8-bit codes and scales, momentum), ordinary arrays of any sharding, and numbers. An ordinary array may
    become sharded and the other way round, and a stack of layers a list of them.

    Tensors that other mesh axes split stay on the devices where they are wanted in the same slices. Into other slices
    they go by way of the host, one array at a time, which one process alone can do.

    Args:
      state: any pytree.
      like: a state of the same tensors as it is wanted, of arrays or `jax.ShapeDtypeStruct`; values do not matter. Of
        an optimizer: `like = {"params": new, "opt": jax.eval_shape(tx.init, new)}`. Or a `Layout`, for sharded
        pytrees and Flax modules (no optimizers, whose states know their layout); the rest stays as it is.
      donate: frees arrays of `state` as soon as all that was in them has been moved. It cannot be used afterwards.
      mesh: with a `Layout`, the mesh to go to, if it is not the present one. Its axes must have the same names.

    Returns:
      A state of the structure of `like`. Arrays that lie right already are passed on as they are, as by
      `jax.device_put`.

    Raises:
      ValueError: the states hold different tensors, or tensors of other shapes, dtypes or quantisation; all of them
        are named. Or blocks that are quantised together would be cut; see `ragged_jax.optim.adamw8bit`.
      NotImplementedError: an array would go by way of the host, and several processes have it.
      TypeError: the state is traced: this is not for use under `jit`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import ragged_jax as rj
      >>> params = {"w": jnp.ones((6, 5)), "b": jnp.ones(5)}
      >>> small, large = (jax.make_mesh((n,), ("fsdp",), devices=jax.devices()[:n]) for n in (1, jax.device_count()))
      >>> before = rj.shard_tree(params, small, axis="fsdp")
      >>> opt = optax.adam(1e-3).init(before)
      >>> new = rj.shard_tree(jax.eval_shape(lambda: params), large, axis="fsdp")
      >>> like = {"params": new, "opt": jax.eval_shape(optax.adam(1e-3).init, new)}
      >>> after = redistribute({"params": before, "opt": opt}, like)
      >>> rj.full_params(after["params"])["w"].sum()
      np.float32(30.0)
    """
    if isinstance(like, Layout):
        like = relaid(state, like, mesh)
    elif mesh is not None:
        raise TypeError("`mesh` goes with a Layout; another state says itself on which devices it is wanted")
    have, _ = items_of(state)
    want, build = items_of(like)
    if any(is_traced(item.leaf) for item in (*have, *want)):
        raise TypeError("redistribute moves arrays between programs; it cannot be called under jit")
    has_values(item.leaf for item in have)
    mover = _Mover(have, want, donate)
    return build([mover.made(item) for item in want])


class _Mover:
    def __init__(self, have: Sequence[Item], want: Sequence[Item], donate: bool):
        self.have, self.donate = have, donate
        self.sources = matched(have, want)
        self.uses: Counter[int] = Counter()
        self.passed_on: set[int] = set()  # arrays that are in the new state, too
        for item in want:
            used = {id(have[s.item].leaf) for name in item.tensors() for s in self.sources[name]}
            self.uses.update(used)
        self.default = next((i.held.of.unit.mesh for i in want if i.held is not None), None)

    def made(self, item: Item) -> Any:
        """A leaf of the new state."""
        names = item.tensors()
        used = sorted({s.item for name in names for s in self.sources[name]})
        items = [self.have[at] for at in used]
        if len(items) == 1 and items[0].held is item.held is None and items[0].name in names:
            return self._ordinary(items[0].leaf, item.leaf)
        sharding = self._sharding(item)
        if sharding is None:
            out = value_by_host(item, self.have, self.sources)
        else:
            out = self._on_devices(item, used, sharding)
        self._release(items, out)
        return out

    def _release(self, items: Sequence[Item], out: Any) -> None:
        for item in items:
            leaf = item.leaf
            if leaf is out:
                self.passed_on.add(id(leaf))
            if self._is_last_use(leaf):
                jax.block_until_ready(out)  # else the next array is allocated before this one is free
                leaf.delete()

    def _is_last_use(self, leaf: Any) -> bool:
        """Whether an array may go after this use of it. A state may hold one under several names."""
        self.uses[id(leaf)] -= 1
        is_free = not self.uses[id(leaf)] and id(leaf) not in self.passed_on
        return self.donate and is_free and isinstance(leaf, jax.Array)

    def _sharding(self, item: Item) -> Any:
        """Where an array is wanted; None for one that is not on devices."""
        if item.held is not None:
            return sharding_of(item)
        if not hasattr(item.leaf, "dtype") or isinstance(item.leaf, np.ndarray | np.generic):
            return None
        sharding: Any = getattr(item.leaf, "sharding", None)
        if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
            sharding = self.default and NamedSharding(self.default, sharding.spec)
        if sharding is None and self.default is not None:
            sharding = NamedSharding(self.default, PartitionSpec())
        return sharding or SingleDeviceSharding(jax.devices()[0])

    def _ordinary(self, x: Any, like: Any) -> Any:
        """From and to an ordinary array or a number."""
        is_last = self._is_last_use(x)
        if type(like) in PYTHON:
            return type(like)(np.asarray(x)[()])
        if isinstance(like, np.ndarray | np.generic):
            return np.asarray(x) if isinstance(like, np.ndarray) else np.asarray(x)[()]
        if not getattr(like, "committed", True) and getattr(x, "is_fully_addressable", True):
            data = jnp.asarray(np.asarray(jax.random.key_data(x) if is_key(x) else x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x)) if is_key(x) else data
        if not isinstance(x, jax.Array):
            x = np.asarray(x, like.dtype)
        known = isinstance(like, jax.ShapeDtypeStruct) and like.sharding is None
        if known and isinstance(x, jax.Array) and (self.default is None or not x.committed):
            self.passed_on.add(id(x))
            return x
        if not is_last:
            self.passed_on.add(id(x))  # what is made of it may share its memory
        return jax.device_put(x, self._sharding(Item("", like)), donate=is_last)

    def _on_devices(self, item: Item, used: Sequence[int], sharding: Any) -> jax.Array:
        shape, dtype = tuple(item.leaf.shape), item.leaf.dtype
        local = sharding.shard_shape(shape)
        leaves = [self.have[at].leaf for at in used]
        if not used or not np.prod(local):
            return array_from_parts(shape, sharding, lambda _: np.zeros(local, dtype), dtype)
        if not all(isinstance(leaf, jax.Array) for leaf in leaves):
            return array_by_host(item, self.have, self.sources, sharding)
        if (orders := self._orders(item)) is None:
            return array_by_host(item, self.have, self.sources, sharding)
        where = sharding.devices_indices_map(shape)
        maps = [leaf.sharding.devices_indices_map(leaf.shape) for leaf in leaves]
        devices = tuple(dict.fromkeys([*where, *(d for of in maps for d in of)]))
        number = {name: i for i, name in enumerate(orders)}  # so that the layers of a model share a program
        wanted = tuple(tuple(self._wanted(item, where.get(d), orders, number)) for d in devices)
        held = tuple(tuple(self._held(used, maps, d, orders, number)) for d in devices)
        locals_ = tuple(leaf.sharding.shard_shape(leaf.shape) for leaf in leaves)
        if wanted == held and leaves[0].shape == shape and leaves[0].sharding == sharding:
            return leaves[0]
        program = plan_program(
            mesh_of(devices),
            tuple(x or (1,) for x in locals_),
            local or (1,),
            str(dtype),
            held,
            wanted,
            max(map(_bucket_nbytes, (item, *(self.have[at] for at in used)), (local, *locals_))),
            _replicas(maps[0], devices),
        )
        return _run(program, leaves, shape, sharding)

    def _wanted(self, item: Item, index: Any, orders: Mapping, number: Mapping[str, int]) -> Iterator[Segment]:
        """What a device wants of the tensors of an array: slices of the numbered ones."""
        if index is not None:
            for s in segments_in(item, index, orders):
                yield s._replace(tensor=f"{number[s.tensor]}{slice_of(item, s.tensor, index)}")

    def _held(
        self, used: Sequence[int], maps: Sequence[Mapping], device: Any, orders: Mapping, number: Mapping[str, int]
    ) -> Iterator[Segment]:
        """What a device has of the tensors that are wanted, where they are wanted."""
        base = 0
        for at, where in zip(used, maps, strict=True):
            item = self.have[at]
            if device in where:
                into: dict[str, list[tuple[str, Source]]] = {}
                for name in orders:
                    for s in self.sources[name]:
                        if s.item == at:
                            into.setdefault(s.name, []).append((name, s))
                kept = {s.name: orders[name] for of in into.values() for name, s in of}
                for part in segments_in(item, where[device], kept):
                    cut = slice_of(item, part.tensor, where[device])
                    for name, s in into[part.tensor]:
                        low, high = max(part.start, s.held), min(part.stop, s.held + s.numel)
                        if low < high:
                            shift = s.wanted - s.held
                            offset = base + part.offset + low - part.start
                            yield Segment(f"{number[name]}{cut}", low + shift, high + shift, HERE, offset)
            base += int(np.prod(item.leaf.sharding.shard_shape(item.leaf.shape)))

    def _orders(self, item: Item) -> dict[str, bool] | None:
        """For each tensor whether its elements go in the order in which both sides store them, not in row-major.

        None where row-major order would take tensors apart into too many pieces for tables, or where other mesh axes
        split them into other slices.
        """
        orders, num_runs = {}, 0
        for name, entry in item.tensors().items():
            there, sources = placement_of(item, name), self.sources[name]
            ends = [there, *(placement_of(self.have[s.item], s.name) for s in sources)]
            if not all(is_sliced_alike(there, end) for end in ends):
                return None
            alike = len(sources) == 1 and sources[0].numel == entry.numel and is_alike(*ends)
            orders[name] = alike
            if not alike:
                num_runs += sum(entry.numel // run_numel(p) for p in ends)
        return orders if num_runs <= _MANY_RUNS else None


def _bucket_nbytes(item: Item, local: tuple[int, ...]) -> int:
    """Memory of a device's part of the bucket that the array belongs to."""
    own = int(np.prod(local)) * itemsize(str(item.leaf.dtype))
    if item.held is None:
        return own
    unit, slab = item.held.of.unit, item.held.of.slab
    bucket = unit.share * unit.bucket.shard_nbytes // itemsize(slab.dtype) * itemsize(str(item.leaf.dtype))
    return max(own, bucket)


def _replicas(where: Mapping[Any, Index], devices: Sequence[Any]) -> tuple[int, ...]:
    """For each device, how many before it hold the same part."""
    seen: Counter[Any] = Counter()
    found = {}
    for device, index in where.items():
        key = tuple((s.start, s.stop) for s in index)
        found[device] = seen[key]
        seen[key] += 1
    return tuple(found.get(d, 0) for d in devices)


def _run(program: Program, leaves: Sequence[jax.Array], shape: tuple[int, ...], sharding: Any) -> jax.Array:
    """Runs a program on the parts that the devices have of some arrays. Nothing is copied on the way in and out."""
    place = NamedSharding(program.mesh, PartitionSpec(AXIS))
    devices = [d for d in program.mesh.devices.flat if d.process_index == jax.process_index()]
    num = program.mesh.size
    zeros = [jax.device_put(np.zeros(1, np.int32), d) for d in devices]
    views = [jax.make_array_from_single_device_arrays((num,), place, zeros)]
    for leaf, local in zip(leaves, program.sources, strict=True):
        if leaf.sharding.memory_kind not in (None, place.memory_kind):
            leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
        own = {shard.device: _shaped(shard.data, local) for shard in leaf.addressable_shards}
        parts = [own[d] if d in own else jax.device_put(np.zeros(local, leaf.dtype), d) for d in devices]
        views.append(jax.make_array_from_single_device_arrays((num * local[0], *local[1:]), place, parts))
    with jax.set_mesh(program.mesh):
        # One program at a time: two in flight take the memory of two.
        out = jax.block_until_ready(compiled(program)(*views))
    local = sharding.shard_shape(shape)
    kept = [_shaped(shard.data, local) for shard in out.addressable_shards if shard.device in sharding.device_set]
    made = jax.make_array_from_single_device_arrays(shape, sharding.with_memory_kind(place.memory_kind), kept)
    return made if sharding.memory_kind in (None, place.memory_kind) else jax.device_put(made, sharding)


def _shaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x if x.shape == shape else x.reshape(shape)  # scalars
