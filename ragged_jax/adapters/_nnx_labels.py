"""A filter for the parameters of a Flax NNX model that have a label."""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from ..fsdp import has_label
from ._nnx_module import slab_of_variable


@dataclass(frozen=True)
class Labelled:
    """See `labelled`."""

    labels: tuple[str, ...]

    def __call__(self, path: Any, value: Any) -> bool:
        of = slab_of_variable(value) if isinstance(value, nnx.Variable) else None
        return of is not None and has_label(of.slab, self.labels)


def labelled(*labels: str) -> Labelled:
    """A Flax filter for the sharded parameters that `fully_shard(..., label=...)` gave one of these labels.

    It says what to train: the rest has no gradients and no optimizer state, and no weight decay moves it. To train
    more of the model later, take another filter (`nnx.Param` for all of it); nothing is sharded anew.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from ragged_jax.adapters import fully_shard
      >>> from ragged_jax.fsdp import value_and_grad
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
      >>> model = fully_shard(model, mesh, axis="fsdp", label={"bias": "trained"})
      >>> optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=labelled("trained"))
      >>> grad_fn = value_and_grad(lambda m, x: m(x).mean(), argnums=nnx.DiffState(0, labelled("trained")))
      >>> _, grads = grad_fn(model, jnp.ones((jax.device_count(), 4)))
      >>> _ = optimizer.update(model, grads)
      >>> len(jax.tree.leaves(grads))
      1
    """
    return Labelled(labels)
