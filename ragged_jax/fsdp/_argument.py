"""How a sharded model passes through `shard_map`: the protocol between the transforms and the adapters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import jax

from ._leaves import SlabOf, leaves_of
from ._sharded_tree import ShardedTree, unshard
from ._unit import Unit


@dataclass(frozen=True)
class Argument:
    """A model as an argument of a transform.

    Attributes:
      unit: of its root bucket; says which mesh and axes. None for an ordinary module that goes along whole.
      params: pytree of arrays to differentiate.
      state: pytree of arrays to carry along: buffers, counters, parameters that are not differentiated.
      specs: partition specs of `params` and of `state`.
      open: inside `shard_map`, from the local params, state and the data axes, the model that the user's
        function gets. It gathers the root bucket.
      close: the state that the user's function left behind, as a pytree of local arrays.
      commit: outside again, what to do with that state. The same on all devices by then.
      grads: from the gradient of `params`, what the user gets.
      slabs: for each leaf of `params` which slab it is, or None.
      undifferentiable: names of the parameters that have no gradient because they are integers.
    """

    unit: Unit | None
    params: Any
    state: Any
    specs: tuple[Any, Any]
    open: Callable[[Any, Any, tuple[str, ...]], Any]
    close: Callable[[Any], Any] = lambda model: ()
    commit: Callable[[Any], None] = lambda state: None
    grads: Callable[[Any], Any] = lambda grads: grads
    slabs: Sequence[SlabOf | None] = ()
    undifferentiable: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.slabs:
            object.__setattr__(self, "slabs", [leaf.of for leaf in leaves_of(self.params)])


@singledispatch
def as_argument(model: Any, wrt: Any = None) -> Argument | None:
    """The argument that a sharded model makes, or None for anything else.

    Args:
      model: any argument of a transform.
      wrt: what to differentiate, in the adapter's own terms; None for its default.
    """
    return None


def is_model(x: Any) -> bool:
    """Whether it would make an argument of its own."""
    return as_argument.dispatch(type(x)) is not as_argument.dispatch(object)


@as_argument.register
def _(model: ShardedTree, wrt: Any = None) -> Argument:
    leaves, treedef = jax.tree.flatten(model)
    smooth = [jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) for x in leaves]
    specs = jax.tree.leaves(model_specs(model))

    def pick(values, flag):
        return [value for value, is_smooth in zip(values, smooth, strict=True) if is_smooth == flag]

    def join(params, state):
        rest, smooth_leaves = iter(state), iter(params)
        return jax.tree.unflatten(treedef, [next(smooth_leaves) if flag else next(rest) for flag in smooth])

    return Argument(
        unit=model.unit,
        params=pick(leaves, True),
        state=pick(leaves, False),
        specs=(pick(specs, True), pick(specs, False)),
        open=lambda params, state, axes: unshard(join(params, state)),
        grads=lambda grads: join(grads, [jax.numpy.zeros_like(x) for x in pick(leaves, False)]),
        slabs=pick([leaf.of for leaf in leaves_of(model)], True),
        undifferentiable=tuple(_integers(model)),
    )


def model_specs(tree: ShardedTree) -> ShardedTree:
    """A tree of the same structure with each array's partition spec."""
    specs = {slab.name: tree.unit.spec(slab) for slab in tree.unit.bucket.slabs}
    slabs = {name: None if tree.slabs[name] is None else spec for name, spec in specs.items()}
    return tree.replace(slabs, {name: model_specs(child) for name, child in tree.children.items()})  # type: ignore


def _integers(tree: ShardedTree) -> list[str]:
    """Names of the tensors that cannot be differentiated."""
    own = [
        tensor.name
        for slab in tree.unit.bucket.slabs
        for tensor in (p.tensor for p in slab.placements)
        if tree.slabs[slab.name] is not None
        and not jax.numpy.issubdtype(tree.slabs[slab.name].dtype, jax.numpy.inexact)
    ]
    return own + [name for child in tree.children.values() for name in _integers(child)]
