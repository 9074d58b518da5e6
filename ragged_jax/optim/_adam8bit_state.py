"""Moments in 8 bits: how they are stored on a mesh, and one step of Adam on them."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..fsdp import Leaf, Leaves, SlabOf, leaves_of
from ..fsdp._check import is_traced
from ..fsdp._splits import entries, other_axes
from ..fsdp._unit import pin
from ..layout import Block
from ._adam8bit_math import Stored, step
from ._blocks import BlockChoice, Grid, choose, grid_of_array, grid_of_slab, not_whole
from ._formula import Finish, Numbers, Rules
from ._maps import MapName, code_map
from ._places import Bits, places_of


class Moment8bit(NamedTuple):
    """A moment of every parameter; three trees of the parameters' structure.

    Attributes:
      codes: uint8, in the shape and sharding of the parameter; without elements where nothing is quantised.
      scales: float32, one a block, of the parameter's rank and sharding.
      exact: float32, the moments of tensors that are not quantised.
    """

    codes: Any
    scales: Any
    exact: Any


@jax.tree_util.register_static
@dataclass(frozen=True)
class Quantisation:
    """What is quantised, in which blocks, and what the codes mean. A value, and a pytree node without leaves.

    Attributes:
      block: the rule; a mapping as a tuple of its items.
      min_numel: tensors with fewer elements keep float32.
      map: the code map.
    """

    block: Block | tuple[tuple[str, Block | None], ...]
    min_numel: int
    map: MapName

    def _choice(self) -> BlockChoice:
        return dict(self.block) if isinstance(self.block, tuple) else self.block

    def block_of(self, name: str, shape: tuple[int, ...]) -> Block | None:
        """In which blocks a tensor is quantised; None for float32."""
        return choose(name, shape, self._choice(), self.min_numel)

    def grid(self, leaf: Leaf) -> tuple[Grid, list[str]]:
        """The blocks of a leaf, and a line for every tensor of it whose blocks are not whole."""
        if leaf.of is None:
            return grid_of_array(leaf.path, leaf.shape, self._choice(), self.min_numel), []
        return self.grid_of_slab(leaf.of)

    def grid_of_slab(self, of: SlabOf) -> tuple[Grid, list[str]]:
        """The same of a slab."""
        unit = of.unit
        return grid_of_slab(unit.bucket, of.slab, unit.num_shards, unit.shares, self._choice(), self.min_numel)


class ScaleByAdam8bitState(NamedTuple):
    """State of `scale_by_adam8bit`.

    Attributes:
      count: steps taken.
      mu, nu: the moments.
      leaves: what the parameters are; static.
      quantisation: in which blocks they are quantised; static.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Moment8bit
    nu: Moment8bit
    leaves: Leaves
    quantisation: Quantisation


@dataclass(frozen=True)
class Adam8bit:
    """The options, and what follows from them for the leaves of a tree."""

    quantisation: Quantisation
    rules: Rules
    _grids: dict[Leaves, tuple[Grid, ...]] = field(default_factory=dict, repr=False, compare=False)

    def grids(self, leaves: Leaves) -> tuple[Grid, ...]:
        """The blocks of every leaf.

        Raises:
          ValueError: a device boundary cuts blocks; every such tensor is listed.
        """
        if leaves not in self._grids:
            faults: list[str] = []
            grids = []
            for leaf in leaves:
                grid, wrong = self.quantisation.grid(leaf)
                grids.append(grid)
                faults += wrong
            if faults:
                raise not_whole(faults)
            self._grids[leaves] = tuple(grids)
        return self._grids[leaves]

    def init(self, params: Any) -> ScaleByAdam8bitState:
        leaves = leaves_of(params)
        grids = self.grids(leaves)
        flat, treedef = jax.tree.flatten(params)
        zero = code_map(self.rules.map, signed=True).zero
        least = max(code_map(self.rules.map, signed=False).zero, self.rules.at_least)
        made = zip(flat, leaves, grids, strict=True)
        parts = [[_make(x, leaf, grid, code) for code in (zero, least)] for x, leaf, grid in made]
        mu, nu = (
            Moment8bit(*(jax.tree.unflatten(treedef, [p[i][j] for p in parts]) for j in range(3))) for i in range(2)
        )
        return ScaleByAdam8bitState(jnp.zeros([], jnp.int32), mu, nu, leaves, self.quantisation)

    def step(
        self,
        numbers: Numbers,
        grads: Any,
        state: ScaleByAdam8bitState,
        alongs: list,
        finishes: list[Finish],
        random: bool = False,
    ):
        """What `finishes` make of the directions, as a list, and the next moments; `random` gives bfloat16 bits."""
        flat, treedef = jax.tree.flatten(grads)
        _same_leaves(flat, state.leaves)
        stored = [
            [Stored(*x) for x in zip(*(jax.tree.leaves(tree) for tree in moment), strict=True)]
            for moment in (state.mu, state.nu)
        ]
        rows = [
            _Row(leaf, grid, finish, (g, mu, nu, along), random and along.dtype == jnp.bfloat16)
            for leaf, grid, finish, g, mu, nu, along in zip(
                state.leaves, self.grids(state.leaves), finishes, flat, *stored, alongs, strict=True
            )
        ]
        done: dict[int, Any] = {}
        groups: dict[Any, list[int]] = {}
        for i, row in enumerate(rows):
            if row.leaf.of is None:
                alone = _on_one_device(row.arrays[0])
                rules = self.rules if alone else replace(self.rules, chunk=None, kernel="xla")
                done[i] = step(row.grid, rules, numbers, 0, *row.arrays, row.finish, row.draw(numbers, 0))
            else:
                unit, slab = row.leaf.of.unit, row.leaf.of.slab
                groups.setdefault((unit.mesh, (unit.axis, *other_axes(slab))), []).append(i)
        for (mesh, axes), members in groups.items():
            done |= zip(members, self._on_mesh(mesh, axes, numbers, [rows[i] for i in members]), strict=True)
        out = [done[i] for i in range(len(rows))]
        new = [Moment8bit(*(jax.tree.unflatten(treedef, [o[k][j] for o in out]) for j in range(3))) for k in (1, 2)]
        return [o[0] for o in out], new[0], new[1]

    def _on_mesh(self, mesh: Any, axes: tuple[str, ...], numbers: Numbers, rows: list["_Row"]) -> list:
        specs = [row.leaf.of.unit.spec(row.leaf.of.slab) for row in rows if row.leaf.of is not None]
        arrays = [row.arrays for row in rows]
        in_specs = [jax.tree.map(lambda _, s=spec: s, a) for spec, a in zip(specs, arrays, strict=True)]
        out_specs = [(spec, Stored(spec, spec, spec), Stored(spec, spec, spec)) for spec in specs]
        whole = jax.tree.map(lambda _: PartitionSpec(), numbers)

        def local(numbers, arrays):
            index = lax.axis_index(axes[0])
            return [
                step(row.grid, self.rules, numbers, index, *own, row.finish, row.draw(numbers, index))  # pyright: ignore[reportCallIssue]
                for row, own in zip(rows, arrays, strict=True)
            ]

        check = self.rules.kernel == "xla"  # the interpreter of Pallas does not know what differs between devices
        specs = {"in_specs": (whole, in_specs), "out_specs": out_specs}
        run = jax.shard_map(local, mesh=mesh, **specs, axis_names=set(axes), check_vma=check)
        inputs, where = (numbers, arrays), (whole, in_specs)
        shardings = jax.tree.map(
            lambda s: NamedSharding(mesh, s), where, is_leaf=lambda s: isinstance(s, PartitionSpec)
        )
        if not any(is_traced(x) for x in jax.tree.leaves(inputs)):
            return jax.jit(run)(*jax.device_put(inputs, shardings))
        if AxisType.Explicit in mesh.axis_types:
            inputs = jax.tree.map(pin, inputs, shardings)
        return run(*inputs)


class _Row(NamedTuple):
    leaf: Leaf
    grid: Grid
    finish: Any
    arrays: tuple[Any, Stored, Stored, Any]
    random: bool

    def draw(self, numbers: Numbers, index: Any) -> Bits | None:
        return places_of(self.leaf).bits(numbers.key, index) if self.random else None


def _same_leaves(flat: list, leaves: Leaves) -> None:
    shapes = [tuple(jnp.shape(x)) for x in flat]
    if len(shapes) != len(leaves) or any(s != leaf.shape for s, leaf in zip(shapes, leaves, strict=False)):
        raise ValueError(
            f"the gradients' shapes, {shapes}, are not those of the parameters that the state was made for, "
            f"{[(leaf.path, leaf.shape) for leaf in leaves]}"
        )


def _on_one_device(x: Any) -> bool:
    """Whether an ordinary array is surely not spread: a scan over a sharded dim would gather it piece by piece."""
    if not is_traced(x):
        return not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1
    mesh = getattr(jax.typeof(x).sharding, "mesh", None) or jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


def _make(x: Any, leaf: Leaf, grid: Grid, code: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, scales and exact moments of one parameter before the first step."""
    shape, rank = leaf.shape, max(1, len(leaf.shape))
    quantised = bool(grid.parts)
    if leaf.of is None:
        scales = _natural_scales(grid, shape) if quantised else (0,) * rank
        codes = jnp.full_like(x, code, dtype=jnp.uint8) if quantised else jnp.zeros((0,) * rank, jnp.uint8)
        exact = jnp.zeros((0,) * rank, jnp.float32) if quantised else jnp.zeros_like(x, dtype=jnp.float32)
        return codes, jnp.zeros(scales, jnp.float32), exact
    unit, slab = leaf.of.unit, leaf.of.slab
    sharding, names = unit.sharding(slab), entries(unit.spec(slab))[unit.stacked :]
    devices = [math.prod(unit.mesh.shape[axis] for axis in axes) for axes in names]  # along each dim

    def compact(room: int) -> tuple[int, ...]:
        sizes = (n * (room if unit.axis in axes else 1) for n, axes in zip(devices, names, strict=True))
        return (*shape[: unit.stacked], *sizes)

    def make(shape: tuple[int, ...], fill: Any, dtype: Any) -> jax.Array:
        if is_traced(x):
            return pin(jnp.full(shape, fill, dtype), sharding)
        return jnp.full(shape, fill, dtype, device=sharding)

    return (
        make(shape if quantised else compact(0), code, jnp.uint8),
        make(compact(grid.num_blocks), 0, jnp.float32),
        make(compact(grid.num_exact) if quantised else shape, 0, jnp.float32),
    )


def _natural_scales(grid: Grid, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an ordinary array's scales: its own with dims divided by the block's, if they divide."""
    (part,) = grid.parts
    block = part.block
    assert block is not None
    if grid.view and block.kind == "tile":
        return (*shape[:-2], shape[-2] // block.size[0], shape[-1] // block.size[1])
    if grid.view and block.kind == "elements" and shape[-1] % block.size[0] == 0:
        return (*shape[:-1], shape[-1] // block.size[0])
    return (grid.num_blocks, *(1,) * (len(shape) - 1))
