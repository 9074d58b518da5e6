"""Muon: every matrix is gathered once to one device, orthogonalised there, and sent back."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from ..fsdp import Leaf, Leaves, leaves_of
from ..fsdp._check import is_traced
from ..fsdp._unit import pin
from ._each_matrix import each_matrix
from ._exchange import each_owned, from_owners, on_devices, to_owners, zeros
from ._forms import Form, form_of
from ._masks import add_decayed_weights, by_element, by_leaf, partition_by
from ._muon_reference import Coefficients, Scale, coefficient_rows, scale_factor
from ._newton_schulz import NewtonSchulz
from ._owners import Class, Forms, Owners, owners_of
from ._routes import Kind, dims_of, route_of
from ._tensors import Rule, Tensor, tensors_of


class MuonState(NamedTuple):
    """The state of `scale_by_muon`.

    Attributes:
      count: of the steps; int32 scalar.
      mu: the momentum, sharded as the parameters are; nothing where Muon has no tensor.
      leaves: what the parameters' arrays are.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Any
    leaves: Leaves


def scale_by_muon(
    *,
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    beta: Any = 0.95,
    nesterov: bool = True,
    bias_correction: bool = False,
    scale: Scale = "spectral",
    dims: Any = None,
    route: Rule[Kind] | None = None,
    mu_dtype: DTypeLike = "float32",
    compute_dtype: DTypeLike = "float32",
    precision: str | None = None,
    balance: float = 0.05,
    exchange_nbytes: int | None = 2**28,
) -> optax.GradientTransformation:
    """Momentum, orthogonalised: the singular values of each matrix are brought near 1.

    The momentum is element-wise and stays where the parameters are. Each matrix is then sent to one owner, in rounds
    of collectives that move all matrices together, so that no collective happens inside Newton-Schulz; work is
    balanced over the devices, and a matrix too large for a fair share is multiplied by all of them. The result is
    that of an unsharded array, whatever the layout and number of devices.

    References: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is
    Scalable for LLM Training", arXiv:2502.16982.

    Args:
      coefficients: of Newton-Schulz: `quintic`, `five_rows`, `polar_express`, a triple, or a triple for each step.
      steps: of Newton-Schulz.
      beta: decay of the momentum, a mean of gradients.
      nesterov: mix the gradient into its momentum once more.
      bias_correction: as optax does it: momentum and gradient are each divided by what its weights add up to. Matters
        in the first steps, and only with `nesterov`, because the result does not depend on scale.
      scale: what updates are multiplied with by shape; see `scale_factor`.
      dims: which dims of a tensor are a matrix: `MatrixDims` for all, a mapping from patterns of the tensor's path to
        them, or a function of path and shape (None: by name and shape, see `dims_of`).
      route: which tensors are Muon's, for the default and for its form see `routing`. The updates of all others pass
        through unchanged, as with `optax.masked`.
      mu_dtype: of the momentum. What it accumulates is computed in float32.
      compute_dtype: of the products of Newton-Schulz, bfloat16 as a rule on accelerators. Matrices are normalised in
        float32 first.
      precision: of the products, as in `jax.lax.dot`.
      balance: how far above the mean a device's work may be before a matrix is sharded, as a fraction.
      exchange_nbytes: of a device's slabs, in float32, that go to owners together; None for all, which takes
        four times their size as temporary memory; in parts it falls towards half of that. A slab, with all its layers
        if they are stacked, is never divided. Results may differ in the last bit of float32.

    Raises:
      ValueError: unknown coefficients or scale; in `init`, dims that a tensor does not have.

    Example:
      >>> import jax.numpy as jnp
      >>> tx, params = scale_by_muon(), {"kernel": jnp.ones((4, 4))}
      >>> updates, state = tx.update({"kernel": jnp.eye(4) * 1e-20}, tx.init(params))
      >>> bool((abs(jnp.diag(updates["kernel"]) - 1) < 0.3).all())
      True
    """
    scale_factor(scale, 1, 1)
    rows = coefficient_rows(coefficients, steps)
    schulz = NewtonSchulz(rows, jnp.dtype(compute_dtype).name, precision, scale)

    def forms(leaves: Leaves) -> Forms:
        return tuple(
            (at, form_of(tensor, dims_of(tensor, dims)))
            for at, tensor in enumerate(tensors_of(leaves))
            if route_of(tensor, route)[0] == "muon"
        )

    def init(params: Any) -> Any:
        leaves, (flat, treedef) = leaves_of(params), jax.tree.flatten(params)
        mine = {tensors_of(leaves)[at].leaf for at, _ in forms(leaves)}
        mu = [
            zeros_for(leaf, x, mu_dtype) if i in mine else optax.MaskedNode()
            for i, (leaf, x) in enumerate(zip(leaves, flat, strict=True))
        ]
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.unflatten(treedef, mu), leaves)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        leaves, (flat, treedef) = state.leaves, jax.tree.flatten(updates)
        wanted = forms(leaves)
        mine = sorted({tensors_of(leaves)[at].leaf for at, _ in wanted})
        count = jnp.asarray(optax.safe_increment(state.count))
        here, ahead = jnp.ones(()), jnp.ones(())
        if bias_correction:
            here, ahead = (1 - jnp.asarray(beta, jnp.float32) ** n for n in (count, count + 1))
        mu, mixed, masked = {}, {}, iter(jax.tree.leaves(state.mu))
        for i in mine:
            grad = flat[i].astype(jnp.float32)
            momentum = beta * next(masked).astype(jnp.float32) + (1 - beta) * grad
            mu[i] = momentum.astype(mu_dtype)
            mixed[i] = (beta / ahead * momentum + (1 - beta) / here * grad) if nesterov else momentum / here
        done = orthogonalised(leaves, wanted, mixed, schulz, balance, exchange_nbytes)
        is_mine = dict.fromkeys((tensors_of(leaves)[at].name for at, _ in wanted), True)
        others = by_leaf(leaves, lambda tensor: tensor.name not in is_mine)
        out = list(flat)
        for i in mine:
            new = done[i].astype(flat[i].dtype)
            other = by_element(leaves.leaves[i], others[i], False)
            out[i] = new if other is False else jnp.where(other, flat[i], new)
        new_mu = [mu.get(i, optax.MaskedNode()) for i in range(len(flat))]
        return jax.tree.unflatten(treedef, out), MuonState(count, jax.tree.unflatten(treedef, new_mu), leaves)

    return optax.GradientTransformation(init, update)


def zeros_for(leaf: Leaf, like: Any, dtype: DTypeLike) -> jax.Array:
    """Zeros that are sharded as a leaf is, also under jit."""
    if leaf.of is None or leaf.shape != leaf.of.unit.shape(leaf.of.slab):  # the latter inside shard_map
        return jnp.zeros_like(like, dtype=dtype)
    sharding = leaf.of.unit.sharding(leaf.of.slab)
    return (
        pin(jnp.zeros(leaf.shape, dtype), sharding)
        if is_traced(like)
        else jnp.zeros(leaf.shape, dtype, device=sharding)
    )


def orthogonalised(
    leaves: Leaves,
    forms: Forms,
    arrays: dict[int, jax.Array],
    schulz: NewtonSchulz,
    balance: float,
    exchange_nbytes: int | None,
) -> dict[int, jax.Array]:
    """The matrices of some leaves, orthogonalised, in float32; zero where no matrix lies.

    Args:
      leaves: of the whole tree.
      forms: of the tensors that are matrices.
      arrays: by index of the leaf, those that hold them.
      schulz: what to do.
      balance, exchange_nbytes: of `scale_by_muon`.
    """
    done, tensors = {}, tensors_of(leaves)
    for at, form in forms:
        if tensors[at].placement is None:
            done[tensors[at].leaf] = _plain(tensors[at], form, arrays[tensors[at].leaf], schulz)
    at_once, before = exchange_nbytes and max(1, exchange_nbytes // 4), {}
    for owners in owners_of(leaves, forms, tolerance=balance, at_once=at_once):
        # One exchange after the other: all at once they would need the memory of all.
        given, before = lax.optimization_barrier(([arrays[i] for i in owners.leaves], before))
        done.update(before)
        before = dict(zip(owners.leaves, _sharded(owners, schulz)(*given), strict=True))
    done.update(before)
    return {i: done.get(i, jnp.zeros_like(x)) for i, x in arrays.items()}


def _plain(tensor: Tensor, form: Form, x: jax.Array, schulz: NewtonSchulz) -> jax.Array:
    stored = x.reshape(-1, form.numel)
    if stored.shape[0] == 1:
        return each_matrix(form, schulz, stored[0]).reshape(x.shape)
    return jax.vmap(lambda item: each_matrix(form, schulz, item).reshape(-1))(stored).reshape(x.shape)


@lru_cache(maxsize=64)
def _sharded(owners: Owners, schulz: NewtonSchulz) -> Any:
    """A function of slabs."""

    def body(*arrays: jax.Array) -> Sequence[jax.Array]:
        owned = to_owners(owners, arrays)
        done = [
            _across(owners, cls, x, schulz) if cls.is_sharded else _own(owners, cls, x, schulz)
            for cls, x in zip(owners.classes, owned, strict=True)
        ]
        return tuple(from_owners(owners, done))

    return on_devices(owners, body)


def _own(owners: Owners, cls: Class, x: jax.Array, schulz: NewtonSchulz) -> jax.Array:
    """Of the matrices that this device owns."""

    def one(item: jax.Array) -> jax.Array:
        return each_matrix(cls.form, schulz, item).reshape(-1)

    return each_owned(owners, cls, one, lambda item: zeros(owners, item.shape, jnp.float32), x)


def _across(owners: Owners, cls: Class, x: jax.Array, schulz: NewtonSchulz) -> jax.Array:
    """Of matrices `[batch, rows of this device, cols]` that all devices work on together."""
    stored, axis, num = cls.form.stored_matrix, owners.unit.axis, owners.unit.num_shards
    assert stored is not None
    rows, cols, _ = stored
    fan = cls.form.rows, cls.form.columns[0]
    if rows >= cols:
        return schulz.sharded(x, axis, fan)
    own = -(-cols // num)  # the longer side is to be spread: from some rows to some columns
    x = jnp.pad(x, ((0, 0), (0, 0), (0, own * num - cols)))
    x = lax.all_to_all(x, axis, 2, 1, tiled=True)
    spread = x.shape[1]
    x = schulz.sharded(x[:, :rows].mT, axis, fan).mT
    x = jnp.pad(x, ((0, 0), (0, spread - rows), (0, 0)))
    return lax.all_to_all(x, axis, 1, 2, tiled=True)[..., :cols]


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = True,
    adamw: optax.GradientTransformation | None = None,
    adamw_learning_rate: optax.ScalarOrSchedule | None = None,
    adamw_b1: Any = 0.9,
    adamw_b2: Any = 0.95,
    adamw_eps: Any = 1e-8,
    adamw_weight_decay: Any = 0.0,
    route: Rule[Kind] | None = None,
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    beta: Any = 0.95,
    nesterov: bool = True,
    bias_correction: bool = False,
    scale: Scale = "spectral",
    dims: Any = None,
    mu_dtype: DTypeLike = "float32",
    compute_dtype: DTypeLike = "float32",
    precision: str | None = None,
    exchange_nbytes: int | None = 2**28,
) -> optax.GradientTransformationExtraArgs:
    """Muon for hidden matrices, AdamW for embeddings, heads, norms, biases and scalars.

    `routing` says who goes where. Under `optax.inject_hyperparams` the counts are no hyperparameters: pass
    `static_args=("steps", "exchange_nbytes")`. The division is by tensor, also where tensors share a slab.

    Args:
      learning_rate: of Muon, and of AdamW if it has none of its own: a number or a schedule.
      weight_decay: of Muon's tensors, times the learning rate.
      weight_decay_mask: which of them to decay, as for `ragged_jax.optim.mask`.
      adamw: a whole optimizer for the rest, in place of AdamW. It must be element-wise, or go by tensor.
      adamw_learning_rate, adamw_b1, adamw_b2, adamw_eps, adamw_weight_decay: of AdamW.
      route: overrules the default: a mapping from patterns of the tensor's path to `"muon"` or `"adamw"`, or a
        function of path and shape that says so, or None for what it has no opinion on.
      coefficients, steps, beta, nesterov, bias_correction, scale, dims, mu_dtype, compute_dtype, precision,
        exchange_nbytes: of `scale_by_muon`.

    Raises:
      ValueError: both `adamw` and `adamw_learning_rate`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = {"embed": jnp.ones((9, 4)), "mlp": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
      >>> tx = muon(0.02, adamw_learning_rate=3e-4)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> optax.apply_updates(params, updates)["embed"].shape
      (9, 4)
    """
    if adamw is not None and adamw_learning_rate is not None:
        raise ValueError("give `adamw`, a whole optimizer with a rate of its own, or `adamw_learning_rate`, not both")
    if adamw is None:
        rate = learning_rate if adamw_learning_rate is None else adamw_learning_rate
        adamw = optax.adamw(rate, adamw_b1, adamw_b2, adamw_eps, weight_decay=adamw_weight_decay)
    hidden = scale_by_muon(
        coefficients=coefficients,
        steps=steps,
        beta=beta,
        nesterov=nesterov,
        bias_correction=bias_correction,
        scale=scale,
        dims=dims,
        route=route,
        mu_dtype=mu_dtype,
        compute_dtype=compute_dtype,
        precision=precision,
        exchange_nbytes=exchange_nbytes,
    )
    decay = add_decayed_weights(weight_decay, weight_decay_mask)
    return partition_by(
        {"muon": optax.chain(hidden, decay, optax.scale_by_learning_rate(learning_rate)), "adamw": adamw},
        lambda tensor: route_of(tensor, route)[0],
    )
