"""A tensor as a view of the slab it lies in: no copy."""

import torch

from ragged_jax.layout import Bucket, Placement


def view_of(whole: torch.Tensor, placement: Placement) -> torch.Tensor:
    """A tensor in its own shape, in place.

    Args:
      whole: the gathered slab, 1-D.
      placement: where the tensor lies; stored transposed, it becomes a transposed view.
    """
    stored = whole[placement.offset : placement.stop].view(placement.stored_shape)
    if placement.axis_order is None:
        return stored
    return stored.permute([placement.axis_order.index(dim) for dim in range(stored.ndim)])


def check_viewable(buckets: tuple[Bucket, ...]) -> None:
    """Refuses layouts whose tensors are not views of their slabs.

    Raises:
      NotImplementedError: naming every tensor that is stored tile by tile, and stacked buckets.
    """
    tiled = [
        p.tensor.name for bucket in buckets for slab in bucket.slabs for p in slab.placements if p.storage == "tiled"
    ]
    if tiled:
        raise NotImplementedError(
            f"stored tile by tile, which is no view in torch: {', '.join(tiled)}; plan with storage='row_major'"
        )
    if stacked := [bucket.name for bucket in buckets if bucket.stack is not None]:
        raise NotImplementedError(f"buckets of layers stacked for a scan have no torch module: {', '.join(stacked)}")
