"""What goes with a ragged tensor in one operation: tensors of which this rank has the same elements, and scalars."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ._geometry import Geometry


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by name, with defaults."""
    schema = func._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {**given, **{a.name: value for a, value in zip(schema, args, strict=False)}, **kwargs}


def flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat(value)
        else:
            yield value


def written(func: Any) -> list[str]:
    """Names of the arguments that an operation changes."""
    return [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def unsupported(func: Any, x: Any) -> NotImplementedError:
    return NotImplementedError(
        f"{func} of a RaggedTensor {tuple(x.shape)} with {x.placements}: its elements are not independent of each "
        "other, or the result is no tensor of that shape. Take the whole tensor (`x.full_tensor()`), rows "
        "(`x.redistribute(placements=[Shard(0)])`), or this rank's elements (`x.to_local()`)"
    )


def operand(cls: type, func: Any, x: torch.Tensor, ref: Any) -> torch.Tensor:
    """This rank's elements of an operand that goes with `ref`.

    Raises:
      NotImplementedError: they are not the ones at the same places.
    """
    wanted: Geometry = ref.geometry
    if isinstance(x, cls):
        held: Geometry = x.geometry  # pyright: ignore[reportAttributeAccessIssue]
        if not _alike(held, wanted):
            raise NotImplementedError(
                f"{func} of {_described(held)} and {_described(wanted)}: redistribute one of them, or use the whole "
                "tensors (`full_tensor()`)"
            )
        return x._local_tensor  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(x, DTensor):
        if x.device_mesh != wanted.mesh or not all(isinstance(p, Replicate) for p in x.placements):
            raise NotImplementedError(
                f"{func} of {_described(wanted)} and a DTensor under {x.placements} on {x.device_mesh}: "
                "RaggedTensor.from_dtensor makes one under the same placements"
            )
        x = x.to_local().detach()
        if x.ndim and tuple(x.shape) == wanted.shape:
            return wanted.mine(x)
    if x.ndim:
        raise NotImplementedError(
            f"{func} of {_described(wanted)} and an ordinary tensor {tuple(x.shape)}: operands are scalars, or have "
            "the same shape and are ragged too (RaggedTensor.from_full makes one of a whole tensor)"
        )
    # For the dtype of the result a scalar counts in full beside a 0-d tensor, and not beside a 1-D one.
    return x if wanted.shape or x.dtype == ref.dtype else x.reshape(1)


def _described(g: Geometry) -> str:
    strides = "" if g.is_row_major else f" (strides {g.strides})"
    return f"a RaggedTensor {g.shape}{strides} under {g.placements} on {g.mesh}"


def _alike(a: Geometry, b: Geometry) -> bool:
    return a is b or (
        a.shape == b.shape and a.strides == b.strides and a.placements == b.placements and a.mesh == b.mesh
    )
