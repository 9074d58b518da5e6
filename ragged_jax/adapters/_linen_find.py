"""Reading a Linen module: which submodules are units, and which of these are stacks, by tracing its `init`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from jax.tree_util import keystr, tree_leaves_with_path

from ..fsdp import Subtree, parse
from ..layout import listed
from ._linen_lift import params_of
from ._match import ModuleUnits, matches

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Found:
    """The units of a module.

    Attributes:
      units: their paths.
      stacks: the paths of those whose parameters have a leading layer dim.
    """

    units: frozenset[str]
    stacks: frozenset[str]

    def parse(self, params: Any) -> Subtree:
        """The module's parameters by unit."""
        units = (lambda path, _: path in self.units) if self.units else None
        stacked = (lambda path, _: path in self.stacks) if self.stacks else None
        return parse(params, units, stacked)


def find(init: Callable, values: Sequence[Any], units: ModuleUnits, stacked: ModuleUnits) -> tuple[Found, Any]:
    """Traces a module's init and sees which submodules are called, with what parameters.

    A stack is a unit that sees parameters of one layer when it is called, and leaves those of many: what
    `nn.scan` and `nn.vmap` make of it.

    Args:
      init: of arrays; returns anything and the variables.
      values: its arguments; shapes will do.
      units, stacked: as for `fully_shard`.

    Returns:
      The units, and what init returns, with shapes for arrays.

    Raises:
      ValueError: units that match nothing or have no parameters, or that are stacked otherwise than was said.
    """
    called: dict[str, tuple[nn.Module, Shapes]] = {}

    def watch(next_fun: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        out = next_fun(*args, **kwargs)
        if context.method_name != "setup" and context.module.scope is not None and context.module.path:
            # The innermost call at a path returns first: inside a scan, with one layer.
            called.setdefault("/".join(context.module.path), (context.module, _shapes(params_of(context.module))))
        return out

    with nn.intercept_methods(watch):
        result = jax.eval_shape(init, *values)
    params = result[1]["params"]
    whole = {path: _shapes(_at(params, path)) for path in called}
    chosen = {path for path, (module, _) in called.items() if whole[path] and matches(units, path, module)}
    if units is not None and not chosen:
        listing = ", ".join(f"{path} ({type(module).__name__})" for path, (module, _) in called.items())
        raise ValueError(f"units={units!r} matches no submodule with parameters; the model calls {listing}")
    stacks = {path for path in chosen if _is_stack(path, called[path][1], whole[path])}
    if stacked is not None:
        said = {path for path in chosen if matches(stacked, path, called[path][0])}
        faults = [f"{path}: stacked, but not said to be" for path in sorted(stacks - said)]
        faults += [f"{path}: a single layer, {_listing(whole[path])}" for path in sorted(said - stacks)]
        if faults or not said:
            raise ValueError(
                f"stacked={stacked!r} does not agree with how the units {', '.join(sorted(chosen))} are called:"
                + listed(faults)
                + "\nLeave `stacked=` out: for Linen it is found out."
            )
    return Found(frozenset(chosen), frozenset(stacks)), result


def _is_stack(path: str, layer: Shapes, whole: Shapes) -> bool:
    """Whether parameters seen in a call are those of one layer of many."""
    if all(whole.get(name) == shape for name, shape in layer.items()):
        return False
    if all(whole[name][1:] == shape for name, shape in layer.items()):
        return True
    raise ValueError(
        f"unit {path} is called with parameters of other shapes than it has: {_listing(layer)} of {_listing(whole)}. "
        "Layers can be stacked once, on dim 0 (`variable_axes={'params': 0}`)"
    )


def _listing(shapes: Shapes) -> str:
    return ", ".join(f"{name}: {shape}" for name, shape in shapes.items())


def _shapes(params: Any) -> Shapes:
    leaves = tree_leaves_with_path(nn.meta.unbox(params))
    return {keystr(path, simple=True, separator="/"): tuple(x.shape) for path, x in leaves}


def _at(tree: Any, path: str) -> Any:
    for key in path.split("/"):
        tree = tree.get(key, {})
    return tree
