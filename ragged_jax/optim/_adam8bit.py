"""Block-wise 8-bit AdamW as optax transforms, and as a step that never makes the update."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..fsdp import Leaf, Leaves, SlabOf, leaves_of
from ..fsdp._check import is_traced
from ..fsdp._splits import entries, other_axes
from ..fsdp._unit import pin
from ..layout import Block
from ._adam8bit_math import Stored, step
from ._blocks import DEFAULT, BlockChoice, Grid, check_choice, choose, grid_of_array, grid_of_slab, not_whole
from ._formula import Finish, Numbers, Rules, power
from ._maps import MapName, code_map
from ._places import Bits, key_of, places_of
from ._quantise import product
from ._stochastic import stochastic_round

MIN_NUMEL = 4096
CHUNK_ON_CPU = 2**17


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
class _Adam:
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


def _as_gradient(n: Numbers, u: jax.Array, g: jax.Array, bits: None) -> jax.Array:
    return u.astype(g.dtype)


def _applied(decay: float) -> Finish:
    """The parameter after the step."""

    def finish(n: Numbers, u: jax.Array, p: jax.Array, bits: jax.Array | None) -> jax.Array:
        p32 = p.astype(jnp.float32)
        if decay:
            u = u + product(p32, jnp.float32(decay))
        new = p32 - product(n.rate, u)
        return new.astype(p.dtype) if bits is None else stochastic_round(new, bits)

    return finish


def _numbers(count: Any, b1: Any, b2: Any, eps: Any, rate: Any = 0.0, seed: Any = 0) -> Numbers:
    f32 = lambda x: jnp.asarray(x, jnp.float32)
    left = lambda b, t: 1 / (1 - power(b, t))
    return Numbers(
        f32(b1), f32(b2), f32(1 - b1), f32(1 - b2), f32(eps), left(b1, count), left(b2, count), left(b1, count + 1),
        f32(rate), key_of(seed, count),
    )  # fmt: skip


def _adam(block, map, min_numel, clamp_second_moment, nesterov, chunk, kernel: Any = "xla") -> _Adam:
    check_choice(block)
    code_map(map, signed=True)
    if chunk == "auto":
        chunk = CHUNK_ON_CPU if jax.default_backend() == "cpu" else None
    rule = tuple(block.items()) if isinstance(block, Mapping) else block
    return _Adam(Quantisation(rule, min_numel, map), Rules(map, int(clamp_second_moment), nesterov, chunk, kernel))


def scale_by_adam8bit(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    block: BlockChoice = DEFAULT,
    map: MapName = "dynamic",
    min_numel: int = MIN_NUMEL,
    clamp_second_moment: bool = True,
    nesterov: bool = False,
    chunk: int | Literal["auto"] | None = "auto",
) -> optax.GradientTransformation:
    """Adam whose moments are kept in 8 bits, block by block: 2.03 bytes a parameter instead of 8.

    Works on ordinary arrays and on the slabs of a sharded model. Codes, scales and updates have the same bits for any
    number of devices, for any grouping, and for the unsharded arrays: what is quantised, and in which blocks, is
    decided by a tensor's path and global shape. Padding is never looked at.

    A gradient that is not finite makes its own update NaN, as in `optax.scale_by_adam`, and from the next step on
    those of its block.

    Args:
      b1, b2: decay rates of the moments.
      eps: added to the denominator.
      block: which elements share a scale; one block (`rj.elements(256)`, `rj.tile(32, 32)`, `rj.rows(1)`), or a
        mapping from patterns of paths to blocks, where None keeps a tensor's moments in float32 and what matches
        nothing has `rj.elements(256)`. No device boundary may cut a block. With rows and tiles, tensors of one dim
        keep their moments in float32.
      map: what the 256 codes stand for: dynamic, linear or fp8.
      min_numel: tensors with fewer elements keep their moments in float32.
      clamp_second_moment: never rounds a second moment to zero unless its whole block is. Without it the update of
        such an element is divided by `eps` alone. False is the published rule, for exchange with other libraries.
      nesterov: looks one step ahead, as `optax.nadam`.
      chunk: elements that are worked on together. Larger ones cost temporary memory, smaller ones time. None: all
        of an array, as suits accelerators and ordinary arrays that you have sharded yourself. By default 2**17 on
        a CPU and None elsewhere.

    Returns:
      The transform. Its state is a `ScaleByAdam8bitState`.

    Raises:
      ValueError: at init, when a device boundary cuts blocks; every such tensor is listed with the remedy.

    Reference: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_adam8bit()
      >>> params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
      >>> updates, state = tx.update(params, tx.init(params))
      >>> state.mu.codes["w"].dtype, state.mu.scales["w"].size, state.mu.exact["b"].dtype
      (dtype('uint8'), 16, dtype('float32'))
    """
    adam = _adam(block, map, min_numel, clamp_second_moment, nesterov, chunk)

    def update(updates: Any, state: ScaleByAdam8bitState, params: Any = None):
        del params
        count: Any = optax.safe_increment(state.count)
        flat, treedef = jax.tree.flatten(updates)
        finishes = [_as_gradient] * len(flat)
        out, mu, nu = adam.step(_numbers(count, b1, b2, eps), updates, state, flat, finishes)
        return jax.tree.unflatten(treedef, out), state._replace(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(adam.init, update)  # pyright: ignore[reportArgumentType]


def adamw8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    block: BlockChoice = DEFAULT,
    map: MapName = "dynamic",
    min_numel: int = MIN_NUMEL,
    clamp_second_moment: bool = True,
    nesterov: bool = False,
    chunk: int | Literal["auto"] | None = "auto",
) -> optax.GradientTransformationExtraArgs:
    """AdamW with moments in 8 bits. See `scale_by_adam8bit` for the options, `optax.adamw` for the rest.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = jnp.ones((64, 64))
      >>> tx = adamw8bit(1e-3)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> bool((optax.apply_updates(params, updates) < params).all())
      True
    """
    return optax.chain(
        scale_by_adam8bit(
            b1, b2, eps, block=block, map=map, min_numel=min_numel, clamp_second_moment=clamp_second_moment,
            nesterov=nesterov, chunk=chunk,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )  # fmt: skip


class FusedOptimizer(NamedTuple):
    """An optimizer that applies its own update.

    Attributes:
      init: from parameters to state.
      apply: from parameters, gradients and state to parameters and state.
    """

    init: Callable
    apply: Callable


def fused_adamw8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any = None,
    *,
    block: BlockChoice = DEFAULT,
    map: MapName = "dynamic",
    min_numel: int = MIN_NUMEL,
    clamp_second_moment: bool = True,
    nesterov: bool = False,
    chunk: int | Literal["auto"] | None = "auto",
    stochastic_rounding: bool = False,
    seed: Any = 0,
    kernel: Literal["xla", "pallas"] = "xla",
) -> FusedOptimizer:
    """`adamw8bit` in one pass: parameters are updated chunk by chunk, and the update of a whole array exists nowhere.

    The learning rate is a number or a schedule; `mask` a tree of bools of the parameters' structure, or a function
    from parameters to one: where to decay weights. With `stochastic_rounding`, bfloat16 parameters are rounded up or
    down at random, with the bits of `ragged_jax.optim.stochastic_rounding(seed)`: the same on any mesh.

    `kernel="pallas"` reads and writes everything once, in a Pallas kernel, for GPU (Triton) and TPU (Mosaic); on a
    CPU it is interpreted, for tests. It is used where blocks are consecutive elements, a power of two of them and at
    least 128, in a tensor with a slab of its own or an ordinary array on one device; all else goes the usual way.

    Raises:
      ValueError: an unknown kernel, or one that is asked for stochastic rounding, which it does not do.

    Example:
      >>> import jax.numpy as jnp
      >>> params = jnp.ones((64, 64))
      >>> optimizer = fused_adamw8bit(1e-3)
      >>> params, state = optimizer.apply(params, params, optimizer.init(params))
      >>> float(params[0, 0]) < 1
      True
    """
    if kernel not in ("xla", "pallas"):
        raise ValueError(f"kernel={kernel!r} is unknown; choose from xla, pallas")
    if kernel == "pallas" and stochastic_rounding:
        raise ValueError('kernel="pallas" rounds to nearest: use kernel="xla" for stochastic rounding')
    adam = _adam(block, map, min_numel, clamp_second_moment, nesterov, chunk, kernel)

    def apply(params: Any, grads: Any, state: ScaleByAdam8bitState) -> tuple[Any, ScaleByAdam8bitState]:
        count: Any = optax.safe_increment(state.count)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        flat, treedef = jax.tree.flatten(params)
        decays = [True] * len(flat)
        if mask is not None:
            decays = jax.tree.leaves(mask(params) if callable(mask) else mask)
        if len(decays) != len(flat):
            raise ValueError(f"the mask has {len(decays)} leaves, the parameters have {len(flat)}")
        numbers = _numbers(count, b1, b2, eps, rate, seed)
        finishes = [_applied(weight_decay if d else 0.0) for d in decays]
        out, mu, nu = adam.step(numbers, grads, state, flat, finishes, stochastic_rounding)
        return jax.tree.unflatten(treedef, out), state._replace(count=count, mu=mu, nu=nu)

    return FusedOptimizer(adam.init, apply)
