"""From a torch module to the tensors that the planner sees."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ragged_jax.layout import BlockRule, Mapped, NameMap, TensorSpec, block_for, elements
from ragged_jax.planner import Group, Plan, plan

from ._dtypes import dtype_name
from ._views import Seen

Units = type[nn.Module] | str | tuple[type[nn.Module] | str, ...] | Callable[[str, nn.Module], bool] | None
FROZEN = "frozen"  # the label of parameters without gradient: they share no slab with others


@dataclass
class Part:
    """A module that becomes a unit.

    Attributes:
      name: its path, with slashes; empty for the root.
      module: the module.
      tensors: by the layout's name, the parameters that are gathered with it.
      uses: by the same, the modules that have that parameter, and the attribute's name.
      seen: by the same, how the layout's tensor becomes the parameter.
      shapes: by the same, of the layout's tensor.
    """

    name: str
    module: nn.Module
    tensors: dict[str, nn.Parameter] = field(default_factory=dict)
    uses: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def group(self, block: BlockRule) -> Group:
        specs = (
            TensorSpec(
                name,
                self.shapes[name],
                dtype_name(x.dtype),
                block_for(name, block),
                label="" if x.requires_grad else FROZEN,
            )
            for name, x in self.tensors.items()
        )
        return Group(self.name, tuple(specs))


def parts_of(module: nn.Module, units: Units, names: NameMap | None = None) -> list[Part]:
    """The units of a module with their parameters, the root first.

    A shared parameter belongs to the innermost unit that contains all of its uses. With `names`, units are called
    and ordered as `ragged_jax` does for a Flax model with tensors of these names.

    Raises:
      ValueError: `units` matches nothing.
      NameMapError: `names` are not those of this module.
    """
    found = {"": Part("", module)}
    modules = dict(module.named_modules())
    for name, child in modules.items():
        if name and _matches(units, name, child, modules):
            found[_path(name)] = Part(_path(name), child)
    if units is not None and len(found) == 1:
        kinds = sorted({type(child).__name__ for child in module.modules()})
        raise ValueError(f"units={units!r} matches no submodule; the model has {', '.join(kinds)}")
    uses: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for name, child in module.named_modules():
        for attribute, parameter in child.named_parameters(recurse=False):
            uses.setdefault(parameter, []).append((_path(name), child, attribute))
    paths = {p: "/".join(filter(None, (places[0][0], places[0][2]))) for p, places in uses.items()}
    called = _called({path: tuple(parameter.shape) for parameter, path in paths.items()}, names)
    for parameter, places in uses.items():
        owners = [{unit for unit in found if _inside(place, unit)} for place, _, _ in places]
        owner = found[max(set.intersection(*owners), key=len)]
        name, shape, seen = called[paths[parameter]]
        owner.tensors[name] = parameter
        owner.uses[name] = [(child, attribute) for _, child, attribute in places]
        owner.seen[name], owner.shapes[name] = seen, shape
    parts = list(found.values())
    return parts if names is None else _renamed(parts)


def _called(
    shapes: Mapping[str, tuple[int, ...]], names: NameMap | None
) -> dict[str, tuple[str, tuple[int, ...], Seen]]:
    """By path of a parameter, what the layout calls it, its shape there, and how torch sees it."""
    if names is None:
        return {path: (path, shape, Seen.same(shape)) for path, shape in shapes.items()}
    dotted = {path.replace("/", "."): path for path in shapes}
    mapped = names.inverse.apply({name: shapes[path] for name, path in dotted.items()})
    if torn := [m.name for m in mapped.values() if len(m.links) > 1 or {*_indices(m)} - {None}]:
        raise NotImplementedError(f"a parameter that is several tensors, or several that are one: {', '.join(torn)}")
    made = {dotted[m.links[0].source]: (m.name, m.shape, m.links[0]) for m in mapped.values()}
    if lost := sorted(shapes.keys() - made.keys()):
        raise ValueError(f"the name map passes over these parameters: {', '.join(lost)}")
    return {path: (name, shape, Seen.of(link, shapes[path])) for path, (name, shape, link) in made.items()}


def _indices(mapped: Mapped) -> tuple[int | None, ...]:
    link = mapped.links[0]
    return (*link.source_index, *link.target_index)


def _renamed(parts: Sequence[Part]) -> list[Part]:
    """Units named after the folder that all of their tensors are in, in the order of a Flax model's tree."""
    folders = [os.path.commonpath([_folder(name) for name in part.tensors] or [""]) for part in parts]
    for part, folder in zip(parts[1:], folders[1:], strict=True):
        if folder and folders.count(folder) == 1:
            part.name = folder
    return [parts[0], *sorted(parts[1:], key=lambda part: _order(part.name))]


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _order(name: str) -> tuple[tuple[bool, int, str], ...]:
    steps = name.split("/")
    return tuple((not s.isdecimal(), int(s) if s.isdecimal() else 0, s) for s in steps)


def plan_module(
    module: nn.Module,
    num_shards: int,
    *,
    units: Units = None,
    block: BlockRule = elements(1),  # noqa: B008
    names: NameMap | None = None,
    **options: Any,
) -> Plan:
    """Plans a torch module: what would lie where, and how much of it is padding.

    Args:
      module: with parameters on any device, `meta` among them.
      num_shards: how many ranks would share it.
      units: which submodules are gathered on their own: types, patterns of paths with slashes (`blocks/*`, which
        chooses nothing inside what it has chosen), or a predicate on name and module.
      block: what must stay whole, as for `ragged_jax`; patterns are of paths with slashes (`blocks/*/mlp/weight`).
      names: from the layout's names and shapes, a Flax model's say, to the module's. The plan is then the Flax
        model's own, with the same fingerprint; see `flax_names`.
      options: of `ragged_jax.planner.plan`. Without `names` the profile is `torch-nccl`: the tensors of a unit
        share a slab, which is one message, where they can.

    Example:
      >>> plan_module(nn.Linear(1000, 64), 7).padding_fraction < 0.01
      True
    """
    return plan_of(parts_of(module, units, names), num_shards, block, is_flax=names is not None, **options)


def plan_of(parts: Sequence[Part], num_shards: int, block: BlockRule, is_flax: bool, **options: Any) -> Plan:
    """The plan of units: one that suits torch, or the one that a Flax model of the same tensors would have."""
    if not is_flax:
        options = {"profile": "torch-nccl", **options}
    return plan([part.group(block) for part in parts], num_shards, **options)


def _matches(units: Units, name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> bool:
    if units is None:
        return False
    if isinstance(units, tuple):
        return any(_matches(one, name, module, modules) for one in units)
    if isinstance(units, str):
        steps = name.split(".")
        around = [".".join(steps[:n]) for n in range(1, len(steps) + 1)]
        called = [x for x in around if not isinstance(modules[x], nn.ModuleList | nn.ModuleDict)]
        return name in called and [x for x in called if fnmatchcase(_path(x), units)][:1] == [name]
    return isinstance(module, units) if isinstance(units, type) else units(name, module)


def _path(name: str) -> str:
    return name.replace(".", "/")


def _inside(path: str, unit: str) -> bool:
    return not unit or path == unit or path.startswith(unit + "/")
