"""One call of a user's function on every device: what goes in split, what comes out joined."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from ..layout import listed, named
from . import _check as check
from ._argument import Argument, is_model
from ._joined import Joined, paths, replicated, vary
from ._memory import to_memory
from ._splits import auto, closed, only, opened, opened_spec, others
from ._unit import pin

_CARRY = (
    "What happened: the function runs on every device with its share of the batch, and jax knows of each value "
    "whether it differs between devices. One made inside, such as `jnp.zeros(...)`, does not, but a loop carry (or "
    "the other branch) that depends on the batch does. Mark the first one with `ragged_jax.varying`, as in "
    "`lax.scan(body, rj.varying(jnp.zeros(...)), xs)`. It changes no number."
)


# What adapters need to be in force while a user's function runs.
around_calls: list[Callable[[], AbstractContextManager]] = []


class Call:
    """A call of a function of sharded models and of a batch.

    Args:
      models: by position, the arguments that are sharded models; those by keyword come after the others.
      args, kwargs: all arguments as the user gave them.
      num_microbatches: into how many parts each device's share of the batch is split.
    """

    def __init__(
        self,
        models: Mapping[int, Argument],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_microbatches: int = 1,
    ):
        self.models = models
        unit = next(model.unit for model in models.values() if model.unit is not None)
        self.mesh, self.axes = unit.mesh, unit.axes
        self.num_devices = math.prod(self.mesh.shape[a] for a in self.axes)
        self._num_args, self._keywords = len(args), tuple(kwargs)
        rest = [None if i in models else arg for i, arg in enumerate((*args, *kwargs.values()))]
        flat, self._treedef = tree_flatten_with_path(rest, is_leaf=lambda x: isinstance(x, replicated) or is_model(x))
        self._leaves = [leaf for _, leaf in flat]
        if inner := [f"{self._name(path)}: {type(leaf).__name__}" for path, leaf in flat if is_model(leaf)]:
            raise TypeError(
                "these models and Flax objects lie in containers, where their arrays would pass for a batch:"
                + listed(inner)
                + "\nGive each as an argument of its own."
            )
        self._specs = [_leaf_spec(leaf, self.axes) for leaf in self._leaves]
        split = [(self._name(path), leaf) for path, leaf in flat if _is_split(leaf)]
        check.batch_divides(split, self.num_devices, self.axes, num_microbatches)
        self._maybe_keys = [name for name, leaf in split if check.may_be_key(leaf)]
        self.is_split = [_is_split(leaf) for leaf, spec in self._pairs() if spec is not None]

    def run(self, function: Callable, params: Mapping, state: Mapping, batch: Sequence) -> tuple[Any, dict]:
        """Inside `shard_map`: the function's output, and the state that it left in the models."""
        dynamic = iter(batch)
        leaves = [leaf if spec is None else self._local(next(dynamic)) for leaf, spec in self._pairs()]
        rest = jax.tree.unflatten(self._treedef, leaves)
        opened = {i: model.open(params[i], state[i], self.axes) for i, model in self.models.items()}
        given = [opened.get(i, arg) for i, arg in enumerate(rest)]
        args, named_args = given[: self._num_args], given[self._num_args :]
        with ExitStack() as stack:
            for context in around_calls:
                stack.enter_context(context())
            try:
                out = function(*args, **dict(zip(self._keywords, named_args, strict=True)))
            except Exception as error:
                if isinstance(error, TypeError) and "manual axis types do not match" in str(error):
                    raise TypeError(f"{error}\n\n{_CARRY}") from error
                if self._maybe_keys and "prng" in str(error).lower():
                    error.add_note(f"{named(self._maybe_keys)} was split, as a batch is. {check.KEYS}")
                raise
        return out, {i: model.close(opened[i]) for i, model in self.models.items()}

    def _name(self, path: tuple) -> str:
        """Of a leaf of the arguments, as users know it."""
        (first, *rest) = path
        if first.idx < self._num_args:
            return f"argument {keystr(path)}"
        return f"keyword argument [{self._keywords[first.idx - self._num_args]!r}]{keystr(tuple(rest))}"

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

    def spmd(self, body: Callable, indices: Sequence[int], scale: Any = None) -> tuple[Any, Any, dict]:
        """Runs `body` on every device and commits the state that it leaves.

        Args:
          body: of this call, params, state, batch and scale; returns a replicated loss, any output, the closed state
            by model, and the gradients of the models at `indices`.
          indices: which models have gradients.
          scale: a scalar that every device gets, or None.

        Returns:
          The loss, the output with its leaves joined (see `apply`), and the gradients by model.
        """
        state = {i: m.state for i, m in self.models.items()}
        output, left = Joined(self.axes), Joined(self.axes, known=paths(state))

        def local(params, state, batch, scale):
            loss, out, closed, grads = body(self, params, state, batch, scale)
            return loss, output.split(out), left.split(closed), grads

        inputs = (
            {i: m.params for i, m in self.models.items()},
            state,
            [leaf for leaf, spec in self._pairs() if spec is not None],
            None if scale is None else jax.numpy.asarray(scale, "float32"),
        )
        in_specs = (
            {i: m.specs[0] for i, m in self.models.items()},
            {i: m.specs[1] for i, m in self.models.items()},
            [spec for spec in self._specs if spec is not None],
            None if scale is None else PartitionSpec(),
        )
        joined = {"whole": PartitionSpec(), "split": PartitionSpec(self.axes)}
        out_specs = (PartitionSpec(), joined, joined, {i: self.models[i].specs[0] for i in indices})
        loss, out, closed, grads = self._enter(self._mapped(local, in_specs, out_specs), inputs, in_specs)
        for i, model_state in left.join(closed).items():
            self.models[i].commit(model_state)
        return loss, output.join(out), grads

    def _mapped(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`shard_map` of a function over the axes of the batch, from and to arrays at rest.

        What the specs say of other axes holds outside. Inside, these axes are automatic.
        """
        names = tuple(sorted({n for spec in flat_specs((in_specs, out_specs)) for n in others(spec, self.axes)}))
        inner = [
            jax.tree.map(lambda s: only(opened_spec(s, self.axes), self.axes), specs, is_leaf=_is_spec)
            for specs in (in_specs, out_specs)
        ]
        mapped = partial(
            jax.shard_map, local, in_specs=inner[0], out_specs=inner[1], axis_names=set(self.axes), check_vma=True
        )
        if not names:
            return mapped(mesh=self.mesh)

        def run(*inputs: Any) -> Any:
            here = jax.sharding.get_abstract_mesh()
            mesh = self.mesh if here.empty else here
            specs = flat_specs(_spread(in_specs, inputs))
            leaves, treedef = jax.tree.flatten(inputs)
            entering = [opened(x, spec, self.axes, mesh) for x, spec in zip(leaves, specs, strict=True)]
            *out, grads = mapped(mesh=mesh)(*jax.tree.unflatten(treedef, entering))
            shapes = {i: [x.shape for x in jax.tree.leaves(self.models[i].params)] for i in grads}
            return (*out, {i: self._at_rest(i, g, shapes[i], mesh) for i, g in grads.items()})

        return auto(run, names, self.mesh, out_specs)

    def _at_rest(self, index: int, grads: Any, shapes: list[tuple[int, ...]], mesh: Any) -> Any:
        leaves, treedef = jax.tree.flatten(grads)
        triples = zip(leaves, shapes, flat_specs(self.models[index].specs[0]), strict=True)
        return jax.tree.unflatten(treedef, [closed(g, shape, s, self.axes, mesh) for g, shape, s in triples])

    def _enter(self, run: Callable, inputs: Any, in_specs: Any) -> Any:
        """Calls `run` with its inputs where it wants them, under jit in any case."""
        leaves, treedef = jax.tree.flatten(inputs)
        check.has_values(leaves)
        specs = flat_specs(_spread(in_specs, inputs))
        shardings = [NamedSharding(self.mesh, spec) for spec in specs]
        if not any(check.is_traced(x) for x in leaves):
            placed = [jax.device_put(x, s) for x, s in zip(leaves, shardings, strict=True)]
            return jax.jit(run)(*jax.tree.unflatten(treedef, placed))
        leaves = [to_memory(x, "device") for x in leaves]
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


def varying(tree: Any) -> Any:
    """Marks arrays made inside a function given to `value_and_grad` or `apply` as ones that may differ by device.

    Inside, jax knows of every value whether it differs between devices, and a `zeros` does not. It cannot be the
    first carry of a `lax.scan` whose body adds something that depends on the batch; `varying(zeros)` can. Anywhere
    else the arrays are returned as they are.

    Example:
      >>> import jax.numpy as jnp
      >>> def total(x):
      ...     return jax.lax.scan(lambda sum_, row: (sum_ + row, None), varying(jnp.zeros(3)), x)[0]
      >>> total(jnp.ones((4, 3))).tolist()
      [4.0, 4.0, 4.0]
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jax.tree.map(lambda x: vary(x, axes), tree) if axes else tree


def _is_split(leaf: Any) -> bool:
    return check.is_array(leaf) and leaf.ndim > 0


def _leaf_spec(leaf: Any, axes: tuple[str, ...]) -> PartitionSpec | None:
    """How an argument's leaf enters: split, whole, or (None) not at all, being static."""
    if _is_split(leaf):
        return PartitionSpec(axes)
    return PartitionSpec() if isinstance(leaf, replicated) or hasattr(leaf, "dtype") else None


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _spread(specs: Any, tree: Any) -> Any:
    """A tree with the spec of each leaf, where one spec may stand for a subtree."""
    return jax.tree.map(lambda s, sub: jax.tree.map(lambda _: s, sub), specs, tree, is_leaf=_is_spec)


def flat_specs(specs: Any) -> list[PartitionSpec]:
    """The partition specs in a pytree of them, in the order of its leaves."""
    return jax.tree.leaves(specs, is_leaf=_is_spec)
