"""From a torch module to the tensors that the planner sees."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ragged_jax.layout import BlockRule, TensorSpec, block_for, elements
from ragged_jax.planner import Group, Plan, plan

from ._dtypes import dtype_name

Units = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | None
FROZEN = "frozen"  # the label of parameters without gradient: they share no slab with others


@dataclass
class Part:
    """A module that becomes a unit.

    Attributes:
      name: its path, with slashes; empty for the root.
      module: the module.
      tensors: by path, the parameters that are gathered with it.
      uses: by path, the modules that have that parameter, and the attribute's name.
    """

    name: str
    module: nn.Module
    tensors: dict[str, nn.Parameter] = field(default_factory=dict)
    uses: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)

    def group(self, block: BlockRule) -> Group:
        specs = (
            TensorSpec(
                name,
                tuple(x.shape),
                dtype_name(x.dtype),
                block_for(name, block),
                label="" if x.requires_grad else FROZEN,
            )
            for name, x in self.tensors.items()
        )
        return Group(self.name, tuple(specs))


def parts_of(module: nn.Module, units: Units) -> list[Part]:
    """The units of a module with their parameters, the root first.

    A shared parameter belongs to the innermost unit that contains all of its uses.

    Raises:
      ValueError: `units` matches nothing.
    """
    found = {"": Part("", module)}
    for name, child in module.named_modules():
        if name and _matches(units, name, child):
            found[_path(name)] = Part(_path(name), child)
    if units is not None and len(found) == 1:
        kinds = sorted({type(child).__name__ for child in module.modules()})
        raise ValueError(f"units={units!r} matches no submodule; the model has {', '.join(kinds)}")
    uses: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for name, child in module.named_modules():
        for attribute, parameter in child.named_parameters(recurse=False):
            uses.setdefault(parameter, []).append((_path(name), child, attribute))
    for parameter, places in uses.items():
        owners = [{unit for unit in found if _inside(place, unit)} for place, _, _ in places]
        owner = found[max(set.intersection(*owners), key=len)]
        path = "/".join(filter(None, (places[0][0], places[0][2])))
        owner.tensors[path] = parameter
        owner.uses[path] = [(child, attribute) for _, child, attribute in places]
    return list(found.values())


def plan_module(
    module: nn.Module,
    num_shards: int,
    *,
    units: Units = None,
    block: BlockRule = elements(1),  # noqa: B008
    **options: Any,
) -> Plan:
    """Plans a torch module: what would lie where, and how much of it is padding.

    Args:
      module: with parameters on any device, `meta` among them.
      num_shards: how many ranks would share it.
      units: which submodules are gathered on their own: types, or a predicate on name and module.
      block: what must stay whole, as for `ragged_jax`; patterns are of paths with slashes (`blocks/*/mlp/weight`).
      options: of `ragged_jax.planner.plan`.

    Example:
      >>> plan_module(nn.Linear(1000, 64), 7).padding_fraction < 0.01
      True
    """
    return plan([part.group(block) for part in parts_of(module, units)], num_shards, **options)


def _matches(units: Units, name: str, module: nn.Module) -> bool:
    if units is None:
        return False
    if isinstance(units, type | tuple):
        return isinstance(module, units)
    return units(name, module)


def _path(name: str) -> str:
    return name.replace(".", "/")


def _inside(path: str, unit: str) -> bool:
    return not unit or path == unit or path.startswith(unit + "/")
