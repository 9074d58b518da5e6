"""Flax NNX: sharding a module, and how it passes through the transforms."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..fsdp import (
    Argument,
    Part,
    Rules,
    SlabOf,
    Unit,
    as_argument,
    create,
    fold_in_device,
    full_params_registry,
    groups_of,
    params_in,
    parts_of,
    shard_like_registry,
    units_of,
)
from ..fsdp import _check as check
from ..layout import BlockRule, Slab, listed
from ..planner import Group
from ._match import ModuleUnits
from ._nnx_find import Owned, Path, find, get_path, join
from ._nnx_module import SLABS, ModuleUnit, PackedTensor, changing, info_of, make_unit, spec_of, stand_in


def shard_nnx(
    model: nnx.Module | Callable[[], nnx.Module],
    rules: Rules,
    *,
    units: ModuleUnits = None,
    stacked: ModuleUnits = None,
    wrt: type[nnx.Variable] = nnx.Param,
) -> nnx.Module:
    """`fully_shard` for NNX, in place."""
    make = None if isinstance(model, nnx.Module) else model
    model = model if isinstance(model, nnx.Module) else nnx.eval_shape(model)
    if already := [join(path) for path, module in nnx.iter_modules(model) if info_of(module) is not None]:
        raise ValueError(f"the model is fully sharded already, at {', '.join(p or '(root)' for p in already)}")
    owned = find(model, wrt, units, stacked)
    made = rules.units((own.group(rules.blocks) for own in owned), _known_specs(owned))
    if make is None:
        _replicate_state(model, wrt, rules.mesh)
        slabs = {own.name: made[own.name].shard(_values(own)) for own in owned}
    else:
        slabs, state = create(lambda: _made(make(), wrt, units, stacked), list(made.values()))
        nnx.update(model, state)
    for own in reversed(owned):  # innermost first: a unit may hold units
        paths = tuple((name, paths) for name, (_, paths) in own.params.items())
        make_unit(own.module, ModuleUnit(made[own.name], paths, wrt), slabs[own.name])
    return model


def _known_specs(owned: list[Owned]) -> dict[str, PartitionSpec]:
    """What variables say of themselves, as `nnx.with_partitioning` leaves it; flax's logical axis rules apply."""
    known = {name: variable for own in owned for name, (variable, _) in own.params.items()}
    return {name: spec.get_raw_value() for name, spec in nnx.get_partition_spec(known).items()}


def _values(own: Owned) -> dict[str, Any]:
    return {name: variable.get_value() for name, (variable, _) in own.params.items()}


def _made(model: nnx.Module, wrt: Any, units: ModuleUnits, stacked: ModuleUnits) -> tuple[dict[str, Any], Any]:
    """A model's parameters by name, and what else there is of it."""
    params = {name: x for own in find(model, wrt, units, stacked) for name, x in _values(own).items()}
    return params, _state(model, wrt)


def _state(model: nnx.Module, wrt: Any) -> nnx.State:
    return nnx.state(model, nnx.All(nnx.Variable, nnx.Not(wrt)))


def _replicate_state(model: nnx.Module, wrt: Any, mesh: Mesh) -> None:
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = _state(model, wrt)
    leaves = jax.tree.leaves(state)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        nnx.update(model, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state))
    elif not any(check.is_traced(x) for x in leaves):
        # Copies: jax may leave arrays in the memory that they have, which another one has, too, and steps donate it.
        nnx.update(model, jax.tree.map(lambda x: x.copy(), jax.device_put(state, everywhere)))


@as_argument.register
def _(model: nnx.Pytree, wrt: Any = None) -> Argument:
    """Of any Flax object: a sharded module, or what goes along with it whole, such as `nnx.Rngs`."""
    info = info_of(model)
    chosen = False if info is None else info.wrt if wrt is None else _chosen(model, info.wrt, wrt)
    graphdef, params, state = nnx.split(model, chosen, ...)

    def open(params: Any, state: Any, axes: tuple[str, ...]) -> nnx.Pytree:
        opened = nnx.merge(graphdef, params, state, copy=True)
        for _, variable in nnx.iter_graph(opened):
            if isinstance(variable, nnx.RngKey):  # dropout differs between devices
                variable.set_raw_value(fold_in_device(variable.get_raw_value(), axes))
        for path, module, unit in _units(opened) if info is not None else ():
            unit.open(module) if path == () else unit.hide(module)
        return opened

    kept = changing(info) if info is not None else nnx.Variable
    return Argument(
        unit=info and info.unit,
        params=params,
        state=state,
        specs=(_specs(params), _specs(state)),
        open=open,
        close=lambda opened: nnx.state(opened, nnx.All(kept, nnx.Not(nnx.RngKey))),
        commit=lambda left: nnx.update(model, left),
        undifferentiable=tuple(_integers(params)),
    )


def _chosen(model: Any, sharded: type, wrt: Any) -> Callable[[Path, Any], bool]:
    """The filter `wrt` on a sharded model: a packed slab is chosen when its tensors are.

    Raises:
      ValueError: it chooses some tensors of a slab and not others; both are named.
    """
    predicate = nnx.filterlib.to_predicate(wrt)
    verdicts: dict[Path, bool] = {}
    torn = []
    for path, module, info in _units(model):
        paths = dict(info.paths)
        for slab in (s for s in info.unit.bucket.slabs if not s.sole):
            votes: dict[bool, list[str]] = {True: [], False: []}
            for tensor in (p.tensor for p in slab.placements):
                place = paths[tensor.name][0]
                variable = stand_in(get_path(module, place), SlabOf(info.unit, slab.name))
                votes[bool(predicate((*path, *place), variable))].append(tensor.name)
            verdicts[_slab_path(path, info, slab)] = bool(votes[True])
            if votes[True] and votes[False]:
                torn.append(f"{', '.join(votes[True])} (chosen) with {', '.join(votes[False])} (not chosen)")
    if torn:
        raise ValueError(
            "a filter cannot choose a part of a packed slab; these tensors share one:"
            + listed(torn)
            + "\nChoose all of them, or keep them apart when they are sharded: `fully_shard(..., label=...)`."
        )
    return lambda path, leaf: isinstance(leaf, sharded) and verdicts.get(path, predicate(path, leaf))


def _specs(state: Any) -> Any:
    """A state of the same structure with the partition spec of each array, as its variable knows it."""

    def specs(variable: Any) -> Any:
        return jax.tree.map(lambda _: spec_of(variable), variable)

    return jax.tree.map(specs, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _integers(params: Any) -> Iterator[str]:
    for path, leaf in nnx.to_flat_state(params):
        if not jax.numpy.issubdtype(_value(leaf).dtype, jax.numpy.inexact):
            yield join(path)


def _units(model: Any) -> Iterator[tuple[Path, nnx.Module, ModuleUnit]]:
    """The units of a model with their paths, the root first."""
    found = [(path, m, info) for path, m in nnx.iter_modules(model) if (info := info_of(m)) is not None]
    yield from sorted(found, key=lambda item: len(item[0]))


def _slab_path(path: Path, info: ModuleUnit, slab: Slab) -> Path:
    return (*path, *dict(info.paths)[slab.name][0]) if slab.sole else (*path, SLABS, slab.name)


@units_of.register
def _(model: nnx.Module) -> list[Unit]:
    return [info.unit for _, _, info in _units(model)]


@parts_of.register
def _(model: nnx.Module) -> list[Part]:
    return [
        Part(
            info.unit,
            info.slabs(module),
            {name: tuple(join((*path, *p)) for p in paths[1:]) for name, paths in info.paths if len(paths) > 1},
            info.unit.reshard and path != (),  # the root is gathered at the start of a step
        )
        for path, module, info in _units(model)
    ]


@params_in.register
def _(model: nnx.Module) -> nnx.State:
    if (info := info_of(model)) is None:
        raise TypeError(f"{type(model).__name__} is not fully sharded, or a part of what is: give the whole model")
    return nnx.state(model, info.wrt)


@groups_of.register
def _(model: nnx.Module, block: BlockRule, units: ModuleUnits, stacked: ModuleUnits, *inputs: Any) -> list[Group]:
    if inputs:
        raise TypeError("an NNX module has its parameters already; example inputs are for Linen modules")
    return [owned.group(block) for owned in find(model, nnx.Param, units, stacked)]


@full_params_registry.register
def _(model: nnx.Module, like: Any = None) -> nnx.State:
    return full_params_registry(params_in(model), model)


@full_params_registry.register
def _(state: nnx.State, like: Any = None) -> nnx.State:
    if not isinstance(like, nnx.Module):
        raise TypeError("a state does not know its layout; give the model: full_params(state, like=model)")
    leaves = dict(nnx.to_flat_state(state))
    full = []
    for path, module, info in _units(like):
        places = {slab.name: _slab_path(path, info, slab) for slab in info.unit.bucket.slabs}
        tensors = info.unit.full({name: _value(leaves[place]) for name, place in places.items() if place in leaves})
        for name, paths in info.paths:
            if name in tensors:
                variable = get_path(module, paths[0])
                kind = variable.variable_type if isinstance(variable, PackedTensor) else type(variable)
                full.append(((*path, *paths[0]), kind(tensors[name], eager_sharding=False)))
    return nnx.from_flat_state(full)


@shard_like_registry.register
def _(like: nnx.Module, tree: nnx.State) -> nnx.State:
    leaves = dict(nnx.to_flat_state(tree))
    sharded = dict(nnx.to_flat_state(nnx.state(like, next(info.wrt for _, _, info in _units(like)))))
    for path, _, info in _units(like):
        tensors = {name: _value(leaves[(*path, *places[0])]) for name, places in info.paths}
        for slab_name, array in info.unit.shard(tensors).items():
            place = _slab_path(path, info, next(s for s in info.unit.bucket.slabs if s.name == slab_name))
            sharded[place] = sharded[place].replace(array)
    return nnx.from_flat_state(list(sharded.items()))


def _value(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
