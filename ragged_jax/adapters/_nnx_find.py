"""Reading a Flax NNX module: which submodules are units, and which parameters each of them owns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from ..fsdp import _check as check
from ..fsdp import stack_length
from ..layout import BlockRule, TensorSpec, block_for, named
from ..planner import Group
from ._match import ModuleUnits, matches

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Owned:
    """The parameters that one module gathers.

    Attributes:
      path: the module's; empty for the root.
      module: the module itself.
      stack: whether its parameters carry a leading layer dim.
      params: by full name, the variable and every path to it from the module.
    """

    path: Path
    module: nnx.Module
    stack: bool
    params: dict[str, tuple[nnx.Variable, tuple[Path, ...]]]

    @property
    def name(self) -> str:
        return join(self.path)

    def group(self, block: BlockRule) -> Group:
        """What the planner needs to know of them."""
        shapes = {name: tuple(variable.get_value().shape) for name, (variable, _) in self.params.items()}
        length = stack_length(self.name, shapes) if self.stack else None
        tensors = (
            TensorSpec(
                name,
                shapes[name][self.stack :],
                str(variable.get_value().dtype),
                block_for(name, block),
                label="" if type(variable) is nnx.Param else type(variable).__name__,
            )
            for name, (variable, _) in self.params.items()
        )
        return Group(self.name, tuple(tensors), length)


def join(path: Path) -> str:
    """A path as users read it: `blocks/0/mlp/kernel`."""
    return "/".join(map(str, path))


def find(model: nnx.Module, wrt: Any, units: ModuleUnits, stacked: ModuleUnits) -> list[Owned]:
    """The root and the units of a model with what each owns, in the order of the module tree.

    A parameter belongs to the innermost unit that contains it. One that is shared belongs to the innermost
    unit that contains all of its uses.

    Raises:
      ValueError: `units` or `stacked` matches no module; the message lists those there are.
      TypeError: parameters that are not numeric arrays.
    """
    # A list of modules is never called, so it gathers nothing; what is in it does.
    modules = {path: x for path, x in nnx.iter_modules(model) if path and not isinstance(x, nnx.List | nnx.Dict)}

    def chosen_by(rule: ModuleUnits, path: Path) -> bool:
        outer = [join(path[:n]) for n in range(1, len(path)) if path[:n] in modules]
        return matches(rule, join(path), modules[path], outer)

    chosen = {path: node for path, node in modules.items() if chosen_by(units, path)}
    stacks = {path for path in chosen if chosen_by(stacked, path)}
    kinds = ", ".join(sorted({type(node).__name__ for node in modules.values()}))
    if units is not None and not chosen:
        paths = named([join(path) for path in modules])
        raise ValueError(f"units={units!r} matches no submodule; the model has {kinds}, their paths are {paths}")
    if stacked is not None and not stacks:
        raise ValueError(f"stacked={stacked!r} matches no unit; the units are {list(map(join, chosen)) or 'none'}")
    owners = {(): Owned((), model, False, {})}
    owners |= {path: Owned(path, node, path in stacks, {}) for path, node in sorted(chosen.items(), key=_order)}
    is_param = nnx.filterlib.to_predicate(wrt)
    aliases = nnx.find_duplicates(model)
    found = {path: v for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable) and is_param(path, v)}
    check.distinct([join(path) for path in found])
    check.arrays_only({join(path): variable.get_value() for path, variable in found.items()})
    for path, variable in sorted(found.items(), key=_order):
        paths = _all_paths(path, aliases)
        home = max((p for p in owners if all(q[: len(p)] == p for q in paths)), key=len)
        owners[home].params[join(path)] = (variable, tuple(q[len(home) :] for q in paths))
    return list(owners.values())


def _order(item: tuple[Path, Any]) -> tuple:
    return tuple((isinstance(key, str), key) for key in item[0])


def _all_paths(path: Path, aliases: list[list[Path]]) -> tuple[Path, ...]:
    """Every path to a variable, the given one first, following modules and variables that are shared."""
    paths, queue = [path], [path]
    while queue:
        current = queue.pop()
        for group in aliases:
            first = tuple(group[0])
            if current[: len(first)] == first:
                for other in group[1:]:
                    new = (*other, *current[len(first) :])
                    if new not in paths:
                        paths.append(new)
                        queue.append(new)
    return tuple(paths)


def get_path(node: Any, path: Path) -> Any:
    """What lies at a path below a module."""
    for key in path:
        node = node[key] if isinstance(node, Mapping | list | tuple | nnx.List | nnx.Dict) else getattr(node, key)
    return node


def set_path(node: Any, path: Path, value: Any) -> None:
    """Puts `value` at a path below a module."""
    *parents, last = path
    parent = get_path(node, tuple(parents))
    if isinstance(parent, Mapping | list | nnx.List | nnx.Dict):
        parent[last] = value  # type: ignore[index]
    else:
        setattr(parent, last, value)
