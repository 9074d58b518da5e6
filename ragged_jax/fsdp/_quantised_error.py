"""How far weights are from themselves after a quantised gather."""

from typing import Any, NamedTuple

import jax
import numpy as np

from ._argument import as_argument
from ._quantised import pack, unpack
from ._splits import not_split
from ._unit import Unit, on_host


class QuantisationError(NamedTuple):
    """How far a tensor is from itself after a quantised gather.

    Attributes:
      max: the largest error, relative to the largest element.
      rms: the root mean square of the errors, relative to that of the elements.
    """

    max: float
    rms: float


def quantisation_error(model: Any) -> dict[str, QuantisationError]:
    """What quantised gathers do to the weights of a sharded model.

    Computed on the host, slab by slab, from the shards as they are.

    Args:
      model: from `fully_shard` or `shard_tree`, with `MixedPrecision(gather_dtype=...)` for all or some units.

    Returns:
      By name, the errors of the tensors that are gathered quantised.
    """
    argument = as_argument(model)
    if argument is None or argument.unit is None:
        raise TypeError(f"{type(model).__name__} is not a sharded model; see `fully_shard` and `shard_tree`")
    errors: dict[str, QuantisationError] = {}
    for array, of in zip(jax.tree.leaves(argument.params), argument.slabs, strict=True):
        if of is None or of.unit.precision.gather_dtype is None or not of.slab.shard_numel:
            continue
        not_split([of.slab], "the error of a quantised gather")
        dtype = str(of.unit.precision.gather_dtype)
        block, whole = of.unit.precision.gather_block, on_host(array)
        parts = whole.reshape(-1, of.slab.shard_numel * of.unit.share)
        arrived = jax.vmap(lambda x, d=dtype, b=block: unpack(pack(x, d, b)[None], x.size, d, b, x.dtype)[0])(parts)
        before, after = (_tensors(of.unit, of.name, x) for x in (whole, np.asarray(arrived).reshape(whole.shape)))
        errors |= {name: _error(before[name], after[name]) for name in before}
    return errors


def _tensors(unit: Unit, name: str, whole: np.ndarray) -> dict[str, np.ndarray]:
    return {k: np.asarray(x, np.float64) for k, x in unit.full({name: whole}).items()}


def _error(before: np.ndarray, after: np.ndarray) -> QuantisationError:
    if not before.any():
        return QuantisationError(0.0, 0.0)
    wrong = np.abs(after - before)
    rms = np.sqrt((wrong**2).mean() / (before**2).mean())
    return QuantisationError(float(wrong.max() / np.abs(before).max()), float(rms))
