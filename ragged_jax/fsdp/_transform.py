"""`value_and_grad` and `apply`: a function of a sharded model and a batch, run on every device's share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ._accumulate import Variables, microbatches
from ._argument import Argument, as_argument
from ._generic import units_of
from ._joined import vary
from ._loss_scale import DynamicLossScale, unscaled
from ._spmd import Call


def value_and_grad(
    function: Callable,
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
    num_microbatches: int = 1,
    reduce: Literal["once", "each"] = "once",
    accumulate_dtype: DTypeLike | None = None,
    loss_scale: ArrayLike | DynamicLossScale | None = None,
) -> Callable:
    """`jax.value_and_grad` for a sharded model: the batch is split over the devices, the loss is their mean.

    The function is written as for one device. It gets the model with its root bucket unsharded, and units that
    unshard themselves as they are called; and of every other array its device's share along dim 0. Scalars
    and random keys are the same everywhere, keys folded with the device's index so that dropout differs.

    Args:
      function: returns the mean loss over the batch it is given, with `has_aux` also anything else. Several models,
        and Flax objects such as `nnx.Rngs`, are arguments of their own, by position or by keyword.
      argnums: which arguments to differentiate, each a sharded model: an index, or several; for a Flax module
        also `nnx.DiffState`.
      has_aux: whether the function returns `(loss, aux)`; for what becomes of aux, see `apply`.
      allow_int: gives integer leaves of a pytree a zero gradient instead of refusing them. Mask them from
        the optimizer: weight decay would move them.
      num_microbatches: runs every device's share of the batch in so many parts, one after the other, and adds up
        their gradients: gradient accumulation. State that the function leaves passes from one to the next, random
        keys differ; aux arrays are concatenated in the order of the batch, what is the same on all devices or marked
        as `replicated` is averaged. Statistics of a batch are those of a microbatch. Integers that are marked as
        `replicated`, such as counters in Linen's state, keep their dtype, and are those of the last microbatch.
        Only state of Flax NNX passes from one microbatch to the next. State that is an argument, as Linen's
        `batch_stats` are, is the same for all of them: what they return is averaged, so that running statistics
        move once by the momentum, towards the mean over the microbatches, and not once for each microbatch.
      reduce: with several microbatches, `"once"` adds up the gradients of whole slabs on each device and reduces
        the sum: no reduction per microbatch, at the price of gradients in full size. `"each"` reduces those of
        each microbatch and adds up shards.
      accumulate_dtype: to add up in; by default that of the parameters.
      loss_scale: a number, an array that differs from step to step, or a `DynamicLossScale`, by which the
        loss is multiplied before it is differentiated, and by which the gradients are divided in float32 after
        they are reduced. The loss that is returned is not scaled; what overflowed stays infinite or NaN.

    Returns:
      A function of the same arguments that returns what `jax.value_and_grad` returns: the mean loss (and aux),
      and the gradient, sharded as the model is.

    Raises:
      TypeError: an argument to differentiate is not a sharded model, or holds integers.
      ValueError: a batch that does not divide, with every bad leaf.

    Example:
      >>> from ragged_jax.fsdp import full_params, shard_tree
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> params = shard_tree({"w": jnp.ones(3)}, mesh, axis="fsdp")
      >>> x = jnp.ones((4 * jax.device_count(), 3))
      >>> loss, grads = value_and_grad(lambda p, x: (x @ p["w"]).mean(), num_microbatches=4)(params, x)
      >>> float(loss), full_params(grads)["w"].tolist()
      (3.0, [1.0, 1.0, 1.0])
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} must be at least 1")
    if reduce not in ("once", "each"):
        raise ValueError(f"reduce={reduce!r} is neither 'once' nor 'each'")

    @wraps(function)
    def wrapped(*args, **kwargs):
        indices, wrt = _argnums(argnums, len(args))
        models = _models(args, kwargs, dict(zip(indices, wrt, strict=True)), allow_int)

        def body(call: Call, params, state, batch, scale):
            num, whole = num_microbatches, num_microbatches > 1 and reduce == "once"
            variables = {
                i: Variables(models[i], params[i], call.axes, num, whole, accumulate_dtype if num > 1 else None)
                for i in indices
            }

            def forward(values, state, batch):
                chosen = {i: variables[i].params(values[i]) for i in indices}
                out, closed = call.run(function, {**params, **chosen}, state, batch)
                loss, aux = out if has_aux else (out, None)
                if jnp.shape(loss) != ():
                    raise TypeError(f"the loss must be a scalar, got shape {jnp.shape(loss)}")
                # A loss that was reduced already is one loss, not one of many with the same value.
                loss = vary(loss, call.axes)
                return loss if scale is None else loss.astype(jnp.float32) * scale, (loss, aux, closed)

            def step(state, batch):
                values = {i: variables[i].values() for i in indices}
                run = jax.value_and_grad(forward, has_aux=True)
                (_, (loss, aux, closed)), grads = run(values, state, batch)
                return loss, aux, closed, grads

            if num == 1:
                loss, aux, closed, sums = step(state, batch)
            else:
                values = {i: variables[i].values() for i in indices}
                zeros = {i: variables[i].zeros(values[i]) for i in indices}
                left = lambda state, batch: forward(values, state, batch)[1][2]
                loss, aux, closed, sums = microbatches(call, step, left, zeros, state, batch, num)
            grads = {i: variables[i].gradient(sums[i]) for i in indices}
            return call.mean(loss), aux, closed, unscaled(grads, scale)

        call = Call(models, args, kwargs, num_microbatches)
        scale = loss_scale.value if isinstance(loss_scale, DynamicLossScale) else loss_scale
        loss, aux, grads = call.spmd(body, indices, scale)
        grads = tuple(models[i].grads(grads[i]) for i in indices)
        value = (loss, aux) if has_aux else loss
        return value, (grads if isinstance(argnums, Sequence) else grads[0])

    return wrapped


def apply(function: Callable) -> Callable:
    """Runs a function of a sharded model over a batch that is split over the devices: evaluation, sampling.

    Args:
      function: of the model and arrays, as for `value_and_grad`.

    Returns:
      A function of the same arguments. Of its outputs, arrays that differ between devices are concatenated
      along dim 0, scalars averaged (integers and booleans as float32, which has all integers up to 2**24), and what
      is the same on all devices is returned as it is: the result of a `lax.pmean`, or of a `lax.psum` for counts.
      What is computed from weights counts as different, since each device gathers them; see `replicated`.
    """

    @wraps(function)
    def wrapped(*args, **kwargs):
        models = _models(args, kwargs, {}, allow_int=True)

        def body(call: Call, params, state, batch, _):
            out, closed = call.run(function, jax.tree.map(_constant, params), state, batch)
            return None, out, closed, {}

        _, out, _ = Call(models, args, kwargs).spmd(body, ())
        return out

    return wrapped


@jax.custom_jvp
def _constant(x: jax.Array) -> jax.Array:
    return x


@_constant.defjvp
def _constant_jvp(primals, tangents):
    raise TypeError("`apply` is not to be differentiated by its model; use `value_and_grad`, which means the loss")


def _argnums(argnums: Any, num_args: int) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Indices, and for each what to differentiate in it (`DiffState` of flax, or None)."""
    several = argnums if isinstance(argnums, Sequence) else (argnums,)
    indices = tuple(getattr(a, "argnum", a) for a in several)
    indices = tuple(i + num_args if i < 0 else i for i in indices)
    return indices, tuple(getattr(a, "filter", None) for a in several)


def _models(
    args: Sequence[Any], kwargs: Mapping[str, Any], wrt: dict[int, Any], allow_int: bool
) -> dict[int, Argument]:
    for index in wrt:
        if not 0 <= index < len(args):
            raise TypeError(f"argnums={index}, but the function was called with {len(args)} positional arguments")
    models = {i: as_argument(arg, wrt.get(i)) for i, arg in enumerate((*args, *kwargs.values()))}
    found = {i: model for i, model in models.items() if model is not None}
    sharded = {i: model.unit for i, model in found.items() if model.unit is not None}
    if not sharded and not wrt:
        raise TypeError("no argument is a sharded model; see `fully_shard` and `shard_tree`")
    if missing := [i for i in wrt if i not in sharded]:
        types = ", ".join(f"{i}: {type(args[i]).__name__}" for i in missing if i < len(args))
        raise TypeError(f"these arguments are not sharded models: {types}; see `fully_shard` and `shard_tree`")
    if idle := [i for i in wrt if not jax.tree.leaves(found[i].params)]:
        raise ValueError(
            f"nothing is to be differentiated in argument {', '.join(map(str, idle))}: its filter or partition "
            f"chooses no parameter. Labels: {', '.join(map(repr, _labels(args[i] for i in idle))) or 'none'}"
        )
    if len(places := {(unit.mesh, unit.axes) for unit in sharded.values()}) > 1:
        raise ValueError(f"the models live on different meshes or axes: {places}")
    if not allow_int:
        names = [name for i in wrt for name in found[i].undifferentiable]
        if names:
            raise TypeError(
                f"these leaves are integers and have no gradient: {', '.join(names)}; keep them out of the tree "
                "that is differentiated, or pass allow_int=True and mask them from the optimizer"
            )
    return found


def _labels(models: Iterable[Any]) -> list[str]:
    tensors = (tensor for model in models for unit in units_of(model) for tensor in unit.bucket.tensors)
    return sorted({tensor.label for tensor in tensors if tensor.label})
