"""Gradient accumulation: every device's share of the batch in several microbatches, under one `lax.scan`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path
from jax.typing import DTypeLike

from ._argument import Argument
from ._check import is_key
from ._joined import marks, vary, varying
from ._precision import FULL, cast_floats
from ._sink import WithSink, drain, make_sink
from ._splits import on_slices, only, opened_spec, others
from ._spmd import Call, flat_specs


class Variables:
    """What is differentiated: the shards themselves, or sinks beside them.

    Args:
      model: the argument that is differentiated.
      params: its local parameters.
      axes: the mesh axes that split the batch.
      num: microbatches.
      whole: whether gradients are added up whole, in sinks.
      dtype: to add up in; None for that of the parameters.
    """

    def __init__(
        self, model: Argument, params: Any, axes: tuple[str, ...], num: int, whole: bool, dtype: DTypeLike | None
    ):
        self.axes, self.num, self.whole, self.dtype = axes, num, whole, dtype
        self.shards, self.treedef = jax.tree.flatten(params)
        self.specs = [opened_spec(spec, axes) for spec in flat_specs(model.specs[0])]
        self.slabs = model.slabs
        self.is_slab = [axes[-1] in spec for spec in self.specs]

    def values(self) -> list[jax.Array]:
        if not self.whole:
            return self.shards
        pairs = zip(self.shards, self.specs, self.is_slab, strict=True)
        return [make_sink(x, s, self.axes, self.dtype) if slab else vary(x, self.axes) for x, s, slab in pairs]

    def params(self, values: Sequence[Any]) -> Any:
        """The parameters that the function gets, as a function of what is differentiated."""
        if self.whole:
            pairs = zip(self.shards, values, self.is_slab, strict=True)
            values = [WithSink(shard, value) if slab else value for shard, value, slab in pairs]
        return jax.tree.unflatten(self.treedef, values)

    def zeros(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        return [cast_floats(jnp.zeros_like(x), self.dtype) for x in values]

    def gradient(self, sums: Sequence[jax.Array]) -> Any:
        """The mean gradient over devices and microbatches, from its sum over the microbatches."""
        grads = []
        for g, shard, spec, of in zip(sums, self.shards, self.specs, self.slabs, strict=True):
            if self.whole:
                precision, mesh = (FULL, None) if of is None else (of.unit.precision, of.unit.mesh)
                run = lambda g, x, spec=spec, p=precision, m=mesh: drain(g, x, spec, self.axes, p, self.num, m)
                inner = only(spec, others(spec, self.axes))
                grads.append(on_slices(run, (inner, inner), inner)(g, shard))
                continue
            # Autodiff averages the gradients of slabs, and sums those of replicated values over the devices: the
            # cast of a replicated value to a varying one transposes to a sum.
            divisor = self.num * (1 if self.axes[-1] in spec else lax.axis_size(self.axes))
            grads.append((g if divisor == 1 else g / divisor).astype(shard.dtype))
        return jax.tree.unflatten(self.treedef, grads)


def microbatches(
    call: Call, step: Callable, forward: Callable, zeros: Any, state: Mapping, batch: Sequence, num: int
) -> tuple[jax.Array, Any, Any, Any]:
    """Runs a step on each microbatch in turn.

    Args:
      call: the call whose batch it is.
      step: of state and microbatch; returns loss, output, closed state and gradients.
      forward: the same without gradients; returns the closed state.
      zeros: where the sum of the gradients starts.
      state: by model, what the first microbatch finds.
      batch: this device's share.
      num: microbatches.

    Returns:
      The mean loss on this device, the output, the state that the last microbatch left, and the sum of the
      gradients. Of the output and of state that the function made, arrays that differ between devices are
      concatenated along dim 0, unless they are marked as `replicated`; everything else is averaged. Integers that
      are so marked, and random keys, are those of the last microbatch.
    """
    outputs = _Outputs(frozenset(path for path, _ in _named(state)))

    def microbatch(i: Any, parts: Sequence) -> list:
        """Random keys differ between microbatches; what is not split is the same in all."""
        queue = iter(parts)
        return [next(queue) if s else _fold_in(x, i) for x, s in zip(batch, call.is_split, strict=True)]

    leaves = (x for x, is_split in zip(batch, call.is_split, strict=True) if is_split)
    split = [x.reshape(num, x.shape[0] // num, *x.shape[1:]) for x in leaves]  # -1 of an empty array is ambiguous

    def body(carry, i_and_parts):
        carried, sums = carry
        i, parts = i_and_parts
        loss, out, closed, grads = step(_update(state, carried), microbatch(i, parts))
        left, arrays = outputs.split(out, closed)
        sums = jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads)
        return ({path: left[path] for path in carried}, sums), (loss, arrays)

    carried = _carried(state, lambda s: forward(s, microbatch(0, [x[0] for x in split])))
    (carried, sums), (losses, arrays) = lax.scan(body, (carried, zeros), (jnp.arange(num), split))
    out, closed = outputs.join(arrays, carried)
    return losses.mean(), out, closed, sums


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]


def _update(state: Any, new: Mapping[str, Any]) -> Any:
    treedef = jax.tree.structure(state)
    return jax.tree.unflatten(treedef, [new.get(path, leaf) for path, leaf in _named(state)])


def _carried(state: Any, forward: Callable) -> dict[str, Any]:
    """The state that a call changes, typed as the call leaves it: it may differ between devices afterwards."""
    carried: dict[str, Any] = {}
    while jax.tree.leaves(state):
        closed = jax.eval_shape(lambda s=carried: forward(_update(state, s)))
        left, before = dict(_named(closed)), dict(_named(_update(state, carried)))
        now = {path: vary(x, tuple(varying(left[path]))) for path, x in before.items() if path in left}
        if now.keys() == carried.keys() and all(varying(x) == varying(carried[path]) for path, x in now.items()):
            break
        carried = now
    return carried


def _fold_in(x: Any, i: Any) -> Any:
    if not (isinstance(x, jax.Array) and is_key(x)):
        return x
    fold = jax.random.fold_in
    for _ in range(x.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(x, i)


class _Outputs:
    """Sorts what a microbatch leaves: state to carry on, arrays to collect, and constants of the trace."""

    def __init__(self, known: frozenset[str]):
        self.known = known

    def split(self, out: Any, closed: Any) -> tuple[dict[str, Any], list[jax.Array]]:
        self._closed = _named(closed)
        flat, self._treedef = jax.tree.flatten((out, closed))
        self._is_one = marks((out, closed))
        num_out = len(flat) - len(self._closed)
        self._names = [None] * num_out + [path if path in self.known else None for path, _ in self._closed]
        carried = {name: leaf for name, leaf in zip(self._names, flat, strict=True) if name is not None}
        self._leaves = [None if isinstance(x, jax.Array) else x for x in flat]
        pairs = zip(self._names, flat, strict=True)
        return carried, [x for name, x in pairs if name is None and isinstance(x, jax.Array)]

    def join(self, arrays: Sequence[jax.Array], carried: Mapping[str, Any]) -> Any:
        queue, leaves = iter(arrays), []
        for name, constant, is_one in zip(self._names, self._leaves, self._is_one, strict=True):
            if name is not None:
                leaves.append(carried[name])
            else:
                leaves.append(_joined(next(queue), is_one) if constant is None else constant)
        return jax.tree.unflatten(self._treedef, leaves)


def _joined(x: jax.Array, is_one: bool) -> jax.Array:
    """Of one leaf of all microbatches, stacked on dim 0; of one value the mean, or the last where there is none."""
    if is_key(x) or (is_one and not jnp.issubdtype(x.dtype, jnp.inexact)):
        return x[-1]
    if varying(x) and x.ndim > 1 and not is_one:
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return (x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)).mean(0)
