"""One call of a user's function on every device: what goes in split, what comes out joined."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from . import _check as check
from ._argument import Argument
from ._joined import Joined, paths, replicated, vary
from ._unit import pin

# What adapters need to be in force while a user's function runs.
around_calls: list[Callable[[], AbstractContextManager]] = []


class Call:
    """A call of a function of sharded models and of a batch.

    Args:
      models: by position, the arguments that are sharded models.
      args, kwargs: all arguments as the user gave them.
    """

    def __init__(self, models: Mapping[int, Argument], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.models = models
        unit = next(model.unit for model in models.values() if model.unit is not None)
        self.mesh, self.axes = unit.mesh, unit.axes
        self.num_devices = math.prod(self.mesh.shape[a] for a in self.axes)
        rest = ([None if i in models else arg for i, arg in enumerate(args)], dict(kwargs))
        flat, self._treedef = tree_flatten_with_path(rest, is_leaf=lambda x: isinstance(x, replicated))
        self._leaves = [leaf for _, leaf in flat]
        self._specs = [_leaf_spec(leaf, self.axes) for leaf in self._leaves]
        split = [(_argument_name(path), leaf) for path, leaf in flat if _is_split(leaf)]
        check.batch_divides(split, self.num_devices, self.axes)

    def run(self, function: Callable, params: Mapping, state: Mapping, batch: Sequence) -> tuple[Any, dict]:
        """Inside `shard_map`: the function's output, and the state that it left in the models."""
        dynamic = iter(batch)
        leaves = [leaf if spec is None else self._local(next(dynamic)) for leaf, spec in self._pairs()]
        args, kwargs = jax.tree.unflatten(self._treedef, leaves)
        opened = {i: model.open(params[i], state[i], self.axes) for i, model in self.models.items()}
        with ExitStack() as stack:
            for context in around_calls:
                stack.enter_context(context())
            out = function(*(opened.get(i, arg) for i, arg in enumerate(args)), **kwargs)
        return out, {i: model.close(opened[i]) for i, model in self.models.items()}

    def _pairs(self):
        return zip(self._leaves, self._specs, strict=True)

    def _local(self, x: Any) -> Any:
        if isinstance(x, replicated):
            return x.value
        if check.is_key(x):
            return fold_in_device(x, self.axes)
        return x

    def mean(self, x: jax.Array) -> jax.Array:
        """Inside: the mean over the devices, the same on all."""
        return lax.pmean(vary(x, self.axes), self.axes)

    def mean_grads(self, index: int, grads: Any) -> Any:
        """Inside: the gradient with its replicated leaves averaged.

        Those of sharded leaves are means already; autodiff sums the others over the devices, because the cast
        of a replicated value to a varying one transposes to a sum.
        """
        leaves, treedef = jax.tree.flatten(grads)
        specs = _flat_specs(self.models[index].specs[0])
        mean = [g / self.num_devices if spec == PartitionSpec() else g for g, spec in zip(leaves, specs, strict=True)]
        return jax.tree.unflatten(treedef, mean)

    def spmd(self, body: Callable, indices: Sequence[int]) -> tuple[Any, Any, dict]:
        """Runs `body` on every device and commits the state that it leaves.

        Args:
          body: of this call, params, state and batch; returns a replicated loss, any output, the closed state
            by model, and the gradients of the models at `indices`.
          indices: which models have gradients.

        Returns:
          The loss, the output with its leaves joined (see `apply`), and the gradients by model.
        """
        state = {i: m.state for i, m in self.models.items()}
        output, left = Joined(self.axes), Joined(self.axes, known=paths(state))

        def local(params, state, batch):
            loss, out, closed, grads = body(self, params, state, batch)
            return loss, output.split(out), left.split(closed), grads

        inputs = (
            {i: m.params for i, m in self.models.items()},
            state,
            [leaf for leaf, spec in self._pairs() if spec is not None],
        )
        in_specs = (
            {i: m.specs[0] for i, m in self.models.items()},
            {i: m.specs[1] for i, m in self.models.items()},
            [spec for spec in self._specs if spec is not None],
        )
        joined = {"whole": PartitionSpec(), "split": PartitionSpec(self.axes)}
        out_specs = (PartitionSpec(), joined, joined, {i: self.models[i].specs[0] for i in indices})
        run = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.axes),
            check_vma=True,
        )
        loss, out, closed, grads = self._enter(run, inputs, in_specs)
        for i, model_state in left.join(closed).items():
            self.models[i].commit(model_state)
        return loss, output.join(out), grads

    def _enter(self, run: Callable, inputs: Any, in_specs: Any) -> Any:
        """Calls `run` with its inputs where it wants them, under jit in any case."""
        leaves, treedef = jax.tree.flatten(inputs)
        specs = _flat_specs(jax.tree.map(lambda s, sub: _broadcast(s, sub), in_specs, inputs, is_leaf=_is_spec))
        shardings = [NamedSharding(self.mesh, spec) for spec in specs]
        if not any(check.is_traced(x) for x in leaves):
            placed = [jax.device_put(x, s) for x, s in zip(leaves, shardings, strict=True)]
            return jax.jit(run)(*jax.tree.unflatten(treedef, placed))
        if AxisType.Explicit in self.mesh.axis_types:
            leaves = [pin(x, s) for x, s in zip(leaves, shardings, strict=True)]
        return run(*jax.tree.unflatten(treedef, leaves))


def fold_in_device(key: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A random key (or array of keys) of the device's own, inside `shard_map`."""
    index = lax.axis_index(axes)
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, index)


def _is_split(leaf: Any) -> bool:
    return check.is_array(leaf) and leaf.ndim > 0


def _leaf_spec(leaf: Any, axes: tuple[str, ...]) -> PartitionSpec | None:
    """How an argument's leaf enters: split, whole, or (None) not at all, being static."""
    if _is_split(leaf):
        return PartitionSpec(axes)
    return PartitionSpec() if isinstance(leaf, replicated) or hasattr(leaf, "dtype") else None


def _argument_name(path: tuple) -> str:
    (_, group), *rest = enumerate(path)
    name = keystr(tuple(key for _, key in rest))
    return f"argument {name}" if getattr(group, "idx", 0) == 0 else f"keyword argument {name}"


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _broadcast(spec: PartitionSpec, subtree: Any) -> Any:
    return jax.tree.map(lambda _: spec, subtree)


def _flat_specs(specs: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(specs, is_leaf=_is_spec)
