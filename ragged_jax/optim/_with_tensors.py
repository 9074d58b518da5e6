"""Any optax transform that needs whole tensors, run where each tensor's owner is."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ..fsdp import Leaves, leaves_of
from ..fsdp._joined import vary
from ..fsdp._slabs import from_stored, to_stored
from ._exchange import each_owned, from_owners, on_devices, to_owners
from ._forms import Form, form_of
from ._masks import by_element, by_leaf
from ._owners import Class, Forms, Owners, owners_of
from ._tensors import chosen, tensors_of


class WithTensorsState(NamedTuple):
    """The state of `with_tensors`.

    Attributes:
      plain: by path, the transform's state for each ordinary array.
      owned: for each mesh and dtype, by the owners' order (a checkpoint of other owners must not pass for this), and
        for each form of tensors, the transform's state with a leading dim that counts the tensors of all devices,
        sharded over them: a tensor's state lives with its owner.
      leaves: what the parameters' arrays are.
    """

    plain: dict[str, Any]
    owned: dict[str, tuple[Any, ...]]
    leaves: Leaves


def with_tensors(inner: optax.GradientTransformation, tensors: Any = True) -> optax.GradientTransformationExtraArgs:
    """Makes a transform that needs whole tensors work on shards, as if it had been written for them.

    Every tensor has an owner. Its gradient (and the tensor itself, when `update` gets the parameters) is sent there,
    the transform runs there on the whole tensor alone, and the update is sent back; all tensors travel together. The
    transform's state stays with the owner and is never sent. So Shampoo, SOAP, Adafactor, GaLore, and trust ratios
    need no distributed code.

    Args:
      inner: treats tensors one by one: its `init` and `update` are called with a single array as the tree. A norm
        over the whole tree is not for it (see `clip_by_global_norm`). Of stacked layers each layer is a tensor, so
        that results do not depend on stacking.
      tensors: which tensors, as for `ragged_jax.optim.mask`. The updates of others pass through unchanged.

    Returns:
      The transform. Other arguments of `update` are passed on to each tensor; they must be the same on all devices.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from ragged_jax.fsdp import full_params, shard_tree
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> params = shard_tree({"w": jnp.ones((4, 6)), "b": jnp.ones(5)}, mesh, axis="fsdp")
      >>> tx = with_tensors(optax.scale_by_trust_ratio())
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> full_params(updates)["w"].shape
      (4, 6)
    """
    tx = optax.with_extra_args_support(inner)

    def forms(leaves: Leaves) -> Forms:
        return tuple((at, form_of(t)) for at, t in enumerate(tensors_of(leaves)) if t.numel and chosen(tensors, t))

    @lru_cache(maxsize=64)
    def starting(owners: Owners) -> Any:
        axis = PartitionSpec(owners.unit.axis)

        def body(*params: jax.Array) -> Any:
            return tuple(
                jax.vmap(lambda x, c=c: _vary(owners, tx.init(_open(c.form, x))))(x)
                for c, x in zip(owners.classes, to_owners(owners, params), strict=True)
            )

        return on_devices(owners, body, out_specs=axis)

    @lru_cache(maxsize=64)
    def stepping(owners: Owners, has_params: bool) -> Any:
        axis = PartitionSpec(owners.unit.axis)

        def body(state: Any, arrays: Any, extra: Any) -> Any:
            grads, *params = (to_owners(owners, some) for some in arrays)
            out, new = [], []
            for i, cls in enumerate(owners.classes):
                done, kept = _step(owners, cls, tx, state[i], grads[i], params[0][i] if params else None, extra)
                out.append(done)
                new.append(kept)
            return tuple(from_owners(owners, out)), tuple(new)

        arrays = (owners.specs,) * (1 + has_params)
        specs = (axis, arrays, PartitionSpec())
        return on_devices(owners, body, in_specs=specs, out_specs=(owners.specs, axis))

    def plain(leaves: Leaves) -> list[int]:
        held = tensors_of(leaves)
        return [held[at].leaf for at, _ in forms(leaves) if held[at].placement is None]

    def init(params: Any) -> Any:
        leaves, flat = leaves_of(params), jax.tree.leaves(params)
        owned = {
            o.order: starting(o)(*(flat[i] for i in o.leaves)) for o in owners_of(leaves, forms(leaves), shard=False)
        }
        return WithTensorsState({leaves.leaves[i].path: tx.init(flat[i]) for i in plain(leaves)}, owned, leaves)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        leaves, (flat, treedef) = state.leaves, jax.tree.flatten(updates)
        values, out = None if params is None else jax.tree.leaves(params), list(flat)
        alone, kept_by = {}, {}
        for i in plain(leaves):
            path, value = leaves.leaves[i].path, None if values is None else values[i]
            out[i], alone[path] = tx.update(flat[i], state.plain[path], value, **extra)
        names = {tensors_of(leaves)[at].name for at, _ in forms(leaves)}
        others = by_leaf(leaves, lambda tensor: tensor.name not in names)
        for owners in owners_of(leaves, forms(leaves), shard=False):
            arrays = tuple(tuple(x[i] for i in owners.leaves) for x in (flat, values) if x is not None)
            done, kept_by[owners.order] = stepping(owners, values is not None)(
                state.owned[owners.order], arrays, extra
            )
            for i, x in zip(owners.leaves, done, strict=True):
                other = by_element(leaves.leaves[i], others[i], False)
                out[i] = x if other is False else jnp.where(other, flat[i], x)
        return jax.tree.unflatten(treedef, out), WithTensorsState(alone, kept_by, leaves)

    return optax.GradientTransformationExtraArgs(init, update)


def _step(owners: Owners, cls: Class, tx: Any, state: Any, grad: jax.Array, param: Any, extra: Any) -> Any:
    """The updates of one class, as stored elements, and its state."""

    def function(x: Any) -> Any:
        state, grad, param = x
        param = None if param is None else _open(cls.form, param)
        new, kept = tx.update(_open(cls.form, grad), state, param, **extra)
        new = to_stored(cls.form.item, new).reshape(-1).astype(grad.dtype)
        kept = jax.tree.map(lambda a, b: a.astype(b.dtype), kept, state)
        return _vary(owners, (new, kept))

    return each_owned(owners, cls, function, lambda x: _vary(owners, (x[1], x[0])), (state, grad, param))


def _open(form: Form, stored: jax.Array) -> jax.Array:
    return from_stored(form.item, stored)


def _vary(owners: Owners, tree: Any) -> Any:
    return jax.tree.map(lambda x: vary(jnp.asarray(x), (owners.unit.axis,)), tree)
