"""Flax Linen: a module whose `init` makes its parameters as shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from ..fsdp import (
    Rules,
    ShardedTree,
    Unit,
    born_sharded,
    groups_of,
    model_specs,
    only_copied,
)
from ..fsdp import _check as check
from ..layout import BlockRule
from ..planner import Group
from ._linen_find import Found, find
from ._match import ModuleUnits


@dataclass(frozen=True)
class Sharding:
    """How a Linen module is to be sharded, once the shapes of its parameters are known; see `fully_shard`."""

    rules: Rules
    units: ModuleUnits
    stacked: ModuleUnits

    def units_for(self, found: Found, params: Any) -> dict[str, Unit]:
        """The buckets on the mesh, by name, of a module with these parameters."""
        return self.rules.units(subtree.group(self.rules.blocks) for subtree in found.parse(params).walk())


def shard_linen(model: nn.Module, rules: Rules, units: ModuleUnits, stacked: ModuleUnits) -> nn.Module:
    """`fully_shard` for Linen: the same module, of a subclass of its class."""
    if hasattr(model, "fully_sharded"):
        raise ValueError(f"{type(model).__name__} is fully sharded already")
    check.mesh_axes(rules.mesh, rules.axis)
    return _as(_sharded_class(type(model), Sharding(rules, units, stacked)), model)


def _as(cls: type, model: nn.Module) -> nn.Module:
    copy = model.clone()
    object.__setattr__(copy, "__class__", cls)
    return copy


def _sharded_class(cls: type[nn.Module], sharding: Sharding) -> type:
    """A subclass that makes parameters as shards, and refuses to be applied to them in the wrong place."""

    def init_with_output(self: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return create(_as(cls, self), sharding, rngs, args, kwargs)

    def init(self: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        return create(_as(cls, self), sharding, rngs, args, kwargs, with_output=False)[1]

    def apply(self: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(variables.get("params"), ShardedTree):
            raise RuntimeError(
                f"{cls.__name__}.apply was called with sharded params outside of this library's `value_and_grad` and "
                "`apply`; write `rj.apply(lambda params, x: model.apply({'params': params}, x))(params, x)`"
            )
        return cls.apply(self, variables, *args, **kwargs)

    methods = {f.__name__: nn.nowrap(f) for f in (init, init_with_output, apply)}
    copies = {name: nn.nowrap(f) for name, f in only_copied(cls.clone, cls.clone).items()}
    space = {**methods, **copies, "fully_sharded": sharding, "__module__": cls.__module__}
    return type(f"FullySharded{cls.__name__}", (cls,), space)


def create(
    model: nn.Module, sharding: Sharding, rngs: Any, args: tuple, kwargs: dict[str, Any], with_output: bool = True
) -> tuple[Any, dict[str, Any]]:
    """Runs a module's init, planned on abstract values, so that each device makes its own shards and no others.

    Args:
      model: the module.
      sharding: how to shard it.
      rngs, args, kwargs: as `init` takes them; a `jax.ShapeDtypeStruct` stands for zeros.
      with_output: whether the module's output is wanted.

    Returns:
      The output or None, and the variables: `params` sharded, all others replicated.
    """
    leaves, treedef = jax.tree.flatten((rngs, args, kwargs))
    dynamic = [hasattr(x, "dtype") and not isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    values = [x for x, is_dynamic in zip(leaves, dynamic, strict=True) if is_dynamic]

    def plain(*values: Any) -> tuple[Any, dict[str, Any]]:
        given = iter(values)
        parts = [next(given) if is_dynamic else _zeros(x) for x, is_dynamic in zip(leaves, dynamic, strict=True)]
        rngs, args, kwargs = jax.tree.unflatten(treedef, parts)
        if with_output:
            out, variables = model.init_with_output(rngs, *args, **kwargs)
        else:
            out, variables = None, model.init(rngs, *args, **kwargs)
        return out, {"params": {}, **nn.meta.unbox(variables)}  # the slabs say where things are

    found, (_, variables) = find(plain, values, sharding.units, sharding.stacked)
    units = sharding.units_for(found, variables["params"])

    def make(*values: Any) -> tuple[Any, dict[str, Any]]:
        out, variables = plain(*values)
        return out, {**variables, "params": found.parse(variables["params"]).build(units, _packed)}

    def specs(x: Any) -> Any:
        return model_specs(x) if isinstance(x, ShardedTree) else PartitionSpec()

    shapes = jax.eval_shape(make, *values)
    everywhere = jax.tree.map(specs, shapes, is_leaf=lambda x: isinstance(x, ShardedTree))
    return born_sharded(make, sharding.rules.mesh, everywhere)(*values)


def _packed(unit: Unit, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {slab.name: unit.packed(slab, tensors) for slab in unit.bucket.slabs}


def _zeros(x: Any) -> Any:
    return jnp.zeros(x.shape, check.canonical_dtype(x)) if isinstance(x, jax.ShapeDtypeStruct) else x


@groups_of.register
def _(model: nn.Module, block: BlockRule, units: ModuleUnits, stacked: ModuleUnits, *inputs: Any) -> list[Group]:
    def plain(*inputs: Any) -> tuple[None, dict[str, Any]]:
        return None, nn.meta.unbox(nn.Module.init(model, jax.random.key(0), *inputs))

    found, (_, variables) = find(plain, inputs, units, stacked)
    return [subtree.group(block) for subtree in found.parse(variables["params"]).walk()]
