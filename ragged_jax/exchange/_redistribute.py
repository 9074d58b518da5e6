"""`redistribute`: a state of one layout as a state of another one, without leaving the devices."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..checkpoint import TensorEntry, find_sources, runs_of
from ..fsdp import array_from_parts, relaid
from ..fsdp._check import has_values, is_traced
from ..layout import Layout, Placement, Segment, TensorSpec, cut_runs, itemsize, row_major_index, stored_runs
from ._holding import HERE, Index
from ._program import AXIS, Program, compiled, mesh_of, plan_program
from ._state import PYTHON, Item, is_key, items_of, region_of, sharding_of

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


class _Source(NamedTuple):
    """Elements of a tensor in another state: `numel` from `held` on become those from `wanted` on."""

    item: int
    name: str
    wanted: int
    held: int
    numel: int


class _Mover:
    def __init__(self, have: Sequence[Item], want: Sequence[Item], donate: bool):
        self.have, self.donate = have, donate
        entries: dict[str, TensorEntry] = {}
        owner: dict[str, int] = {}
        for at, item in enumerate(have):
            for name, entry in item.tensors().items():
                entries[name], owner[name] = entry, at
        self.sources: dict[str, list[_Source]] = {}
        self.uses: Counter[int] = Counter()
        self.passed_on: set[int] = set()  # arrays that are in the new state, too
        _check(entries, want)
        for item in want:
            of_item = []
            for name, entry in item.tensors().items():
                found = find_sources(entries, name, entry.shape)
                self.sources[name] = [_Source(owner[s.name], s.name, s.wanted, s.held, s.numel) for s in found]
                of_item += self.sources[name]
            self.uses.update({id(self.have[s.item].leaf): 1 for s in of_item})
        self.default = next((i.held.of.unit.mesh for i in want if i.held is not None), None)

    def made(self, item: Item) -> Any:
        """A leaf of the new state."""
        names = item.tensors()
        used = sorted({s.item for name in names for s in self.sources[name]})
        items = [self.have[at] for at in used]
        if len(items) == 1 and items[0].held is item.held is None and items[0].name in names:
            return self._ordinary(items[0].leaf, item.leaf)
        sharding = self._sharding(item)
        out = self._on_host(item) if sharding is None else self._on_devices(item, used, sharding)
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
            return self._from_host(item, sharding)
        where = sharding.devices_indices_map(shape)
        maps = [leaf.sharding.devices_indices_map(leaf.shape) for leaf in leaves]
        devices = tuple(dict.fromkeys([*where, *(d for of in maps for d in of)]))
        orders = self._orders(item)
        if orders is None:
            return self._from_host(item, sharding)
        wanted = tuple(tuple(_segments(item, where[d], orders)) if d in where else () for d in devices)
        held = tuple(tuple(self._held(used, maps, d, orders)) for d in devices)
        number = {name: str(i) for i, name in enumerate(orders)}
        wanted, held = (
            tuple(tuple(s._replace(tensor=number[s.tensor]) for s in device) for device in side)
            for side in (wanted, held)
        )
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

    def _held(self, used: Sequence[int], maps: Sequence[Mapping], device: Any, orders: Mapping) -> Iterator[Segment]:
        """What a device has of the tensors that are wanted, where they are wanted."""
        base = 0
        for at, where in zip(used, maps, strict=True):
            item = self.have[at]
            if device in where:
                into: dict[str, list[tuple[str, _Source]]] = {}
                for name in orders:
                    for s in self.sources[name]:
                        if s.item == at:
                            into.setdefault(s.name, []).append((name, s))
                kept = {s.name: orders[name] for of in into.values() for name, s in of}
                for part in _segments(item, where[device], kept):
                    for name, s in into[part.tensor]:
                        low, high = max(part.start, s.held), min(part.stop, s.held + s.numel)
                        if low < high:
                            shift = s.wanted - s.held
                            offset = base + part.offset + low - part.start
                            yield Segment(name, low + shift, high + shift, HERE, offset)
            base += int(np.prod(item.leaf.sharding.shard_shape(item.leaf.shape)))

    def _orders(self, item: Item) -> dict[str, bool] | None:
        """For each tensor whether its elements go in the order in which both sides store them, not in row-major.

        None where row-major order would take tensors apart into too many pieces for tables.
        """
        orders, num_runs = {}, 0
        for name, entry in item.tensors().items():
            there, sources = _placement(item, name), self.sources[name]
            ends = [there, *(_placement(self.have[s.item], s.name) for s in sources)]
            alike = len(sources) == 1 and sources[0].numel == entry.numel and _alike(*ends)
            orders[name] = alike
            if not alike:
                num_runs += sum(entry.numel // _run_numel(p) for p in ends)
        return orders if num_runs <= _MANY_RUNS else None

    def _from_host(self, item: Item, sharding: Any) -> jax.Array:
        """By way of the host, tensor by tensor: what is there already, or lies in too many pieces for tables."""
        flat = {name: self._whole(name, entry) for name, entry in item.tensors().items()}
        shape, dtype = tuple(item.leaf.shape), item.leaf.dtype
        local = sharding.shard_shape(shape)

        def part(index: Index) -> np.ndarray:
            out = np.zeros(int(np.prod(local)), dtype)
            for s in _segments(item, index, dict.fromkeys(flat, True)):
                at = row_major_index(_placement(item, s.tensor), np.arange(s.start, s.stop))
                out[s.offset : s.offset + s.stop - s.start] = flat[s.tensor][at]
            return out.reshape(local)

        return array_from_parts(shape, sharding, part, dtype)

    def _on_host(self, item: Item) -> Any:
        """A number or a numpy array from anything."""
        ((name, entry),) = item.tensors().items()
        value = self._whole(name, entry).reshape(entry.shape)
        if type(item.leaf) in PYTHON:
            return type(item.leaf)(value[()])
        return value if isinstance(item.leaf, np.ndarray) else value[()]

    def _whole(self, name: str, entry: TensorEntry) -> np.ndarray:
        """A tensor's elements in row-major order."""
        out = np.zeros(entry.numel, jnp.dtype(entry.dtype))
        for source in self.sources[name]:
            item = self.have[source.item]
            for index, data in _parts(item):
                for s in _segments(item, index, {source.name: True}):
                    at = row_major_index(_placement(item, s.tensor), np.arange(s.start, s.stop)) - source.held
                    inside = (at >= 0) & (at < source.numel)
                    out[at[inside] + source.wanted] = data[s.offset : s.offset + s.stop - s.start][inside]
        return out


def _parts(item: Item) -> Iterator[tuple[Index, np.ndarray]]:
    """The parts of an item's array, flat, each once."""
    leaf = item.leaf
    if not isinstance(leaf, jax.Array):
        value = np.asarray(leaf)
        yield (slice(None),) * value.ndim, value.reshape(-1)
        return
    if not leaf.is_fully_addressable:
        raise NotImplementedError(
            f"{item.name} would go by way of the host, and parts of it are on devices of other processes; save it "
            "with a `Checkpointer` and restore it"
        )
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            yield shard.index, np.asarray(shard.data).reshape(-1)


def _segments(item: Item, index: Index, orders: Mapping[str, bool]) -> Iterator[Segment]:
    """What a part of an array holds of some tensors, in stored order where `orders` says so, else in row-major."""
    if item.held is None:
        shape = tuple(getattr(item.leaf, "shape", ()))
        if item.name in orders:
            for run in runs_of(region_of(index, shape), shape):
                yield Segment(item.name, run.first, run.first + run.numel, HERE, run.at)
        return
    for s in item.held.segments(index):
        if (stored := orders.get(s.tensor)) is None:
            continue
        placement = item.held.placement(s.tensor)
        if stored or _is_row_major(placement):
            yield s
            continue
        for first, at, numel in cut_runs(stored_runs(placement), s.start, s.stop):
            yield Segment(s.tensor, first, first + numel, HERE, s.offset + at - s.start)


def _placement(item: Item, name: str) -> Placement:
    if item.held is not None:
        return item.held.placement(name)
    return Placement(TensorSpec(name, item.tensors()[name].shape), 0)


def _is_row_major(placement: Placement) -> bool:
    return placement.storage == "row_major" and placement.axis_order is None


def _alike(a: Placement, b: Placement) -> bool:
    """Whether two tensors of the same shape lie in the same order."""
    if (a.storage, a.axis_order) != (b.storage, b.axis_order):
        return False
    return a.storage == "row_major" or a.tensor.block == b.tensor.block


def _run_numel(placement: Placement) -> int:
    """Elements that are surely stored together, on average."""
    shape = placement.tensor.shape
    if _is_row_major(placement) or not placement.tensor.numel:
        return max(1, placement.tensor.numel)
    if placement.storage == "tiled":
        return min(placement.tensor.block.size[1], shape[-1])
    assert placement.axis_order is not None
    return shape[-1] if placement.axis_order[-1] == len(shape) - 1 else 1


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


def _check(entries: Mapping[str, TensorEntry], want: Sequence[Item]) -> None:
    """Raises ValueError when a state does not hold what another one wants, or more; every difference is listed."""
    faults, used, taken = [], set(), Counter[str]()
    for item in want:
        for name, entry in item.tensors().items():
            found = find_sources(entries, name, entry.shape)
            used |= {source.name for source in found}
            taken.update({source.name: source.numel for source in found})
            if not found and name in entries:
                faults.append(f"{name}: shape {entries[name].shape}, wanted with {entry.shape}")
                used.add(name)
            elif not found:
                faults.append(f"{name}: not in the state")
            for there in (entries[source.name] for source in found[:1]):
                if there.dtype != entry.dtype:
                    faults.append(f"{name}: {there.dtype}, wanted as {entry.dtype}")
                if there.attributes != entry.attributes:
                    faults.append(f"{name}: {there.attributes}, wanted with {entry.attributes}")
    faults += [f"{name}: not wanted, and would be lost" for name in entries.keys() - used]
    faults += [
        f"{name}: {numel} of its {entries[name].numel} elements are wanted, the others would be lost"
        for name, numel in taken.items()
        if numel < entries[name].numel
    ]
    if any("owned/" in fault for fault in faults):
        faults.append(
            "~ the state of `with_tensors` is its owners'; it moves only between devices with the same owners"
        )
    if faults:
        more = [f"and {len(faults) - 50} more"] if len(faults) > 50 else []
        raise ValueError("this state cannot become that one:\n  " + "\n  ".join([*sorted(faults)[:50], *more]))
