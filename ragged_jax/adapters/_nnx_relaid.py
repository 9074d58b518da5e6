"""A fully sharded Flax NNX module in another layout, abstractly."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..fsdp import relaid_registry, relaid_units
from ..layout import Layout
from ._nnx_module import ModuleUnit, info_of, make_unit, original_class, slab_of_variable


@relaid_registry.register
def _(model: nnx.Module, layout: Layout, mesh: Mesh | None) -> nnx.Module:
    infos = {path: info for path, module in nnx.iter_modules(model) if (info := info_of(module)) is not None}
    if () not in infos:
        raise TypeError(f"{type(model).__name__} is not fully sharded, or a part of what is: give the whole model")
    ordered = sorted(infos.items(), key=lambda item: len(item[0]))
    units = relaid_units([info.unit for _, info in ordered], layout, mesh)
    everywhere = NamedSharding(units[""].mesh, PartitionSpec())

    def shape(variable: Any) -> Any:
        if not isinstance(variable, nnx.Variable) or slab_of_variable(variable) is not None:
            return variable
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), variable)

    graphdef, state = nnx.split(model)
    copy = nnx.merge(graphdef, jax.tree.map(shape, state, is_leaf=lambda x: isinstance(x, nnx.Variable)), copy=True)
    modules = dict(nnx.iter_modules(copy))
    for path, info in reversed(ordered):  # innermost first
        module = modules[path]
        object.__setattr__(module, "__class__", original_class(module))
        tensors = {t.name: _abstract(info, t) for t in info.unit.bucket.tensors}
        info.fill(module, tensors)
        unit = units[info.unit.bucket.name]
        slabs: Any = {slab.name: unit.abstract(slab) for slab in unit.bucket.slabs}
        make_unit(module, ModuleUnit(unit, info.paths, info.wrt), slabs)
    return copy


def _abstract(info: ModuleUnit, tensor: Any) -> jax.ShapeDtypeStruct:
    stack = info.unit.bucket.stack
    lead = () if stack is None else (stack,)
    return jax.ShapeDtypeStruct((*lead, *tensor.full_shape), tensor.dtype)
