"""Block-wise 8-bit AdamW as optax transforms, and as a step that never makes the update."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._adam8bit_state import Adam8bit, Quantisation, ScaleByAdam8bitState
from ._blocks import DEFAULT, BlockChoice, check_choice
from ._formula import Finish, Numbers, Rules, power
from ._maps import MapName, code_map
from ._places import key_of
from ._quantise import product
from ._stochastic import stochastic_round

MIN_NUMEL = 4096
CHUNK_ON_CPU = 2**17


def _as_gradient(n: Numbers, u: jax.Array, g: jax.Array, bits: None) -> jax.Array:
    return u.astype(g.dtype)


def _applied(decay: float) -> Finish:
    """The parameter after the step."""

    def finish(n: Numbers, u: jax.Array, p: jax.Array, bits: jax.Array | None) -> jax.Array:
        p32 = p.astype(jnp.float32)
        if decay:
            u = u + product(p32, jnp.float32(decay))
        new = p32 - product(n.rate, u)
        return new.astype(p.dtype) if bits is None else stochastic_round(new, bits)

    return finish


def _numbers(count: Any, b1: Any, b2: Any, eps: Any, rate: Any = 0.0, seed: Any = 0) -> Numbers:
    f32 = lambda x: jnp.asarray(x, jnp.float32)
    left = lambda b, t: 1 / (1 - power(b, t))
    return Numbers(
        f32(b1), f32(b2), f32(1 - b1), f32(1 - b2), f32(eps), left(b1, count), left(b2, count), left(b1, count + 1),
        f32(rate), key_of(seed, count),
    )  # fmt: skip


def _engine(block, map, min_numel, clamp_second_moment, nesterov, chunk, kernel: Any = "xla") -> Adam8bit:
    check_choice(block)
    code_map(map, signed=True)
    if chunk == "auto":
        chunk = CHUNK_ON_CPU if jax.default_backend() == "cpu" else None
    rule = tuple(block.items()) if isinstance(block, Mapping) else block
    return Adam8bit(Quantisation(rule, min_numel, map), Rules(map, int(clamp_second_moment), nesterov, chunk, kernel))


def scale_by_adam8bit(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    block: BlockChoice = DEFAULT,
    map: MapName = "dynamic",
    min_numel: int = MIN_NUMEL,
    clamp_second_moment: bool = True,
    nesterov: bool = False,
    chunk: int | Literal["auto"] | None = "auto",
) -> optax.GradientTransformation:
    """Adam whose moments are kept in 8 bits, block by block: 2.03 bytes a parameter instead of 8.

    Works on ordinary arrays and on the slabs of a sharded model. Codes, scales and updates have the same bits for any
    number of devices, for any grouping, and for the unsharded arrays: what is quantised, and in which blocks, is
    decided by a tensor's path and global shape. Padding is never looked at.

    A gradient that is not finite makes its own update NaN, as in `optax.scale_by_adam`, and from the next step on
    those of its block.

    Args:
      b1, b2: decay rates of the moments.
      eps: added to the denominator.
      block: which elements share a scale; one block (`rj.elements(256)`, `rj.tile(32, 32)`, `rj.rows(1)`), or a
        mapping from patterns of paths to blocks, where None keeps a tensor's moments in float32 and what matches
        nothing has `rj.elements(256)`. No device boundary may cut a block. With rows and tiles, tensors of one dim
        keep their moments in float32.
      map: what the 256 codes stand for: dynamic, linear or fp8.
      min_numel: tensors with fewer elements keep their moments in float32.
      clamp_second_moment: never rounds a second moment to zero unless its whole block is. Without it the update of
        such an element is divided by `eps` alone. False is the published rule, for exchange with other libraries.
      nesterov: looks one step ahead, as `optax.nadam`.
      chunk: elements that are worked on together. Larger ones cost temporary memory, smaller ones time. None: all
        of an array, as suits accelerators and ordinary arrays that you have sharded yourself. By default 2**17 on
        a CPU and None elsewhere.

    Returns:
      The transform. Its state is a `ScaleByAdam8bitState`.

    Raises:
      ValueError: at init, when a device boundary cuts blocks; every such tensor is listed with the remedy.

    Reference: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_adam8bit()
      >>> params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
      >>> updates, state = tx.update(params, tx.init(params))
      >>> state.mu.codes["w"].dtype, state.mu.scales["w"].size, state.mu.exact["b"].dtype
      (dtype('uint8'), 16, dtype('float32'))
    """
    adam = _engine(block, map, min_numel, clamp_second_moment, nesterov, chunk)

    def update(updates: Any, state: ScaleByAdam8bitState, params: Any = None):
        del params
        count: Any = optax.safe_increment(state.count)
        flat, treedef = jax.tree.flatten(updates)
        finishes = [_as_gradient] * len(flat)
        out, mu, nu = adam.step(_numbers(count, b1, b2, eps), updates, state, flat, finishes)
        return jax.tree.unflatten(treedef, out), state._replace(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(adam.init, update)  # pyright: ignore[reportArgumentType]


def adamw8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    block: BlockChoice = DEFAULT,
    map: MapName = "dynamic",
    min_numel: int = MIN_NUMEL,
    clamp_second_moment: bool = True,
    nesterov: bool = False,
    chunk: int | Literal["auto"] | None = "auto",
) -> optax.GradientTransformationExtraArgs:
    """AdamW with moments in 8 bits. See `scale_by_adam8bit` for the options, `optax.adamw` for the rest.

    Under `optax.inject_hyperparams` the counts are no hyperparameters: pass `static_args=("min_numel", "chunk")`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = jnp.ones((64, 64))
      >>> tx = adamw8bit(1e-3)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> bool((optax.apply_updates(params, updates) < params).all())
      True
    """
    return optax.chain(
        scale_by_adam8bit(
            b1, b2, eps, block=block, map=map, min_numel=min_numel, clamp_second_moment=clamp_second_moment,
            nesterov=nesterov, chunk=chunk,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )  # fmt: skip


class FusedOptimizer(NamedTuple):
    """An optimizer that applies its own update: `params, state = tx.apply(params, grads, state)`.

    Attributes:
      init: from parameters to state.
      apply: from parameters, gradients and state to parameters and state.
    """

    init: Callable
    apply: Callable


def fused_adamw8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any = None,
    *,
    block: BlockChoice = DEFAULT,
    map: MapName = "dynamic",
    min_numel: int = MIN_NUMEL,
    clamp_second_moment: bool = True,
    nesterov: bool = False,
    chunk: int | Literal["auto"] | None = "auto",
    stochastic_rounding: bool = False,
    seed: Any = 0,
    kernel: Literal["xla", "pallas"] = "xla",
) -> FusedOptimizer:
    """`adamw8bit` in one pass: parameters are updated chunk by chunk, and the update of a whole array exists nowhere.

    The learning rate is a number or a schedule; `mask` a tree of bools of the parameters' structure, or a function
    from parameters to one: where to decay weights. With `stochastic_rounding`, bfloat16 parameters are rounded up or
    down at random, with the bits of `ragged_jax.optim.stochastic_rounding(seed)`: the same on any mesh.

    `kernel="pallas"` reads and writes everything once, in a Pallas kernel, for GPU (Triton) and TPU (Mosaic); on a
    CPU it is interpreted, for tests. It is used where blocks are consecutive elements, a power of two of them and at
    least 128, in a tensor with a slab of its own or an ordinary array on one device; all else goes the usual way.

    Raises:
      ValueError: an unknown kernel, or one that is asked for stochastic rounding, which it does not do.

    Example:
      >>> import jax.numpy as jnp
      >>> params = jnp.ones((64, 64))
      >>> optimizer = fused_adamw8bit(1e-3)
      >>> params, state = optimizer.apply(params, params, optimizer.init(params))
      >>> float(params[0, 0]) < 1
      True
    """
    if kernel not in ("xla", "pallas"):
        raise ValueError(f"kernel={kernel!r} is unknown; choose from xla, pallas")
    if kernel == "pallas" and stochastic_rounding:
        raise ValueError('kernel="pallas" rounds to nearest: use kernel="xla" for stochastic rounding')
    adam = _engine(block, map, min_numel, clamp_second_moment, nesterov, chunk, kernel)

    def apply(params: Any, grads: Any, state: ScaleByAdam8bitState) -> tuple[Any, ScaleByAdam8bitState]:
        count: Any = optax.safe_increment(state.count)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        flat, treedef = jax.tree.flatten(params)
        decays = [True] * len(flat)
        if mask is not None:
            decays = jax.tree.leaves(mask(params) if callable(mask) else mask)
        if len(decays) != len(flat):
            raise ValueError(f"the mask has {len(decays)} leaves, the parameters have {len(flat)}")
        numbers = _numbers(count, b1, b2, eps, rate, seed)
        finishes = [_applied(weight_decay if d else 0.0) for d in decays]
        out, mu, nu = adam.step(numbers, grads, state, flat, finishes, stochastic_rounding)
        return jax.tree.unflatten(treedef, out), state._replace(count=count, mu=mu, nu=nu)

    return FusedOptimizer(adam.init, apply)
