"""`Item`: a tensor of a checkpoint, and what of it this rank holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ragged_jax.checkpoint import TensorEntry
from ragged_jax.layout import Placement

from ._dtypes import dtype_name

REST = "state"  # the file of what is in no unit


@dataclass(frozen=True)
class AsSaved:
    """A tensor that torch has no use for and that is to be saved again as it was, such as a random key of JAX.

    Give `AsSaved()` to `Checkpointer.restore`; what comes back can be saved.

    Attributes:
      value: the tensor.
      attributes: what the checkpoint says of it.
    """

    value: torch.Tensor | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """A tensor of a state on this rank.

    Attributes:
      name: in the checkpoint.
      placement: shape, dtype and order of the whole tensor.
      span: which of its stored elements this rank has.
      data: these, 1-D and contiguous. Restoring writes to it.
      mine: whether this rank saves them, and not another one that has the same.
      group: what is saved in one file.
      attributes: what the checkpoint says of it.
    """

    name: str
    placement: Placement
    span: tuple[int, int]
    data: torch.Tensor
    mine: bool
    group: str = REST
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def entry(self) -> TensorEntry:
        """What the checkpoint declares."""
        tensor, order = self.placement.tensor, self.placement.axis_order
        return TensorEntry(
            dtype_name(self.data.dtype), tensor.shape, axis_order=order, attributes=dict(self.attributes)
        )
