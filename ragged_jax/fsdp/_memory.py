"""Host memory for what a step needs only once: optimizer state and parameters.

jax knows of every array, also of a traced one, in which memory it lies, and an operation reads from one memory only.
So what lives on the host is moved to the device before it is used, and back afterwards, inside the jitted step; the
compiler turns that into copies that it schedules.
"""

from typing import Any, Literal

import jax
import optax

from ._check import is_traced

MemoryKind = Literal["device", "pinned_host"]
_SPACES = {"device": jax.memory.Space.Device, "pinned_host": jax.memory.Space.Host}


def to_memory(tree: Any, memory_kind: MemoryKind) -> Any:
    """Moves arrays to the host's or the devices' memory, each shard on its own. Shardings stay as they are.

    Works in and out of jit. Scalars stay where they are: a counter is not worth a copy.

    Args:
      tree: a pytree of arrays, such as a `ShardedTree`, an optimizer's state or the state of a Flax module. For a
        module itself: `nnx.update(model, to_memory(nnx.state(model), ...))`.
      memory_kind: `pinned_host` or `device`.

    Returns:
      The tree with its arrays in that memory. Outside of jit those that are there already are not copied.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> to_memory({"w": jnp.ones(3)}, "pinned_host")["w"].sharding.memory_kind
      'pinned_host'
    """
    if memory_kind not in _SPACES:
        raise ValueError(f"memory_kind must be one of {', '.join(_SPACES)}, got {memory_kind!r}")
    return jax.tree.map(lambda x: _moved(x, memory_kind) if _is_large(x) else x, tree)


def _is_large(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.ndim > 0


def _moved(x: jax.Array, memory_kind: str) -> jax.Array:
    if is_traced(x):
        space = _SPACES[memory_kind]
        return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)
    return jax.device_put(x, x.sharding.with_memory_kind(memory_kind))


def offload(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same optimizer with its state in the host's memory between steps.

    `update` moves the state to the devices, computes there and moves the new state back, so a donated step keeps no
    state on the devices. The numbers are those of `tx`.

    Args:
      tx: any optax transform.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones(3)}
      >>> state = offload(optax.adam(1e-3)).init(params)
      >>> state[0].mu["w"].sharding.memory_kind, state[0].count.sharding.memory_kind
      ('pinned_host', 'device')
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return to_memory(inner.init(to_memory(params, "device")), "pinned_host")

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(updates, to_memory(state, "device"), to_memory(params, "device"), **extra)
        return updates, to_memory(state, "pinned_host")

    return optax.GradientTransformationExtraArgs(init, update)
