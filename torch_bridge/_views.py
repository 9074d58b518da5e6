"""A tensor as a view of the slab it lies in: no copy, also where torch names its dims in another order."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ragged_jax.layout import Bucket, Link, Placement


@dataclass(frozen=True)
class Seen:
    """How torch sees a tensor of a layout: a Flax kernel is (in, out), a torch weight (out, in).

    Attributes:
      dims: of the layout's tensor, finer than its shape where a dim is split or joined.
      order: these, in torch's order.
      shape: in torch.
    """

    dims: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def same(cls, shape: tuple[int, ...]) -> "Seen":
        """As it is in the layout."""
        return cls(shape, tuple(range(len(shape))), shape)

    @classmethod
    def of(cls, link: Link, shape: tuple[int, ...]) -> "Seen":
        """From how the layout's tensor is made of torch's."""
        return cls(link.target_dims, tuple(link.axes.index(dim) for dim in range(len(link.axes))), shape)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Torch's tensor, a view. RuntimeError where it is none."""
        return tensor.view(self.dims).permute(self.order).view(self.shape)

    def undo(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The layout's tensor, of this shape, from torch's."""
        fine = tensor.reshape([self.dims[dim] for dim in self.order])
        return fine.permute([self.order.index(dim) for dim in range(len(self.order))]).reshape(shape)


def view_of(whole: torch.Tensor, placement: Placement, seen: Seen) -> torch.Tensor:
    """A tensor as torch sees it, in place.

    Args:
      whole: the gathered slab, 1-D.
      placement: where the tensor lies; stored transposed, it becomes a transposed view.
      seen: how torch sees it.
    """
    stored = whole[placement.offset : placement.stop].view(placement.stored_shape)
    if (order := placement.axis_order) is not None:
        stored = stored.permute([order.index(dim) for dim in range(stored.ndim)])
    return seen.view(stored)


def stored_part(tensor: torch.Tensor, placement: Placement, seen: Seen, low: int, high: int) -> torch.Tensor:
    """Some of the elements of torch's tensor, in the order in which they are stored."""
    there = seen.undo(tensor, placement.tensor.shape)
    return there.permute(placement.axis_order or tuple(range(there.ndim))).reshape(-1)[low:high]


def check_viewable(buckets: tuple[Bucket, ...], seen: Mapping[str, Seen]) -> None:
    """Refuses layouts whose tensors are not views of their slabs.

    Raises:
      NotImplementedError: naming every tensor that is stored tile by tile, and every one that would be a copy.
    """
    placements = [p for bucket in buckets for slab in bucket.slabs for p in slab.placements]
    if tiled := [p.tensor.name for p in placements if p.storage == "tiled"]:
        raise NotImplementedError(
            f"stored tile by tile, which is no view in torch: {', '.join(tiled)}; plan with storage='row_major'"
        )
    if copied := [p.tensor.name for p in placements if not _is_view(p, seen[p.tensor.name])]:
        raise NotImplementedError(
            f"torch would have to copy these to see them in its own shape: {', '.join(copied)}; "
            "plan with axis_order='natural', or change the name map's dims"
        )


def _is_view(placement: Placement, seen: Seen) -> bool:
    try:
        view_of(torch.empty(placement.stop, device="meta"), placement, seen)
    except RuntimeError:
        return False
    return True
