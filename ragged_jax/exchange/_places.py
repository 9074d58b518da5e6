"""Which elements of which tensors lie in a part of an array, and in which order."""

from collections.abc import Iterator, Mapping

import numpy as np

from ..checkpoint import runs_of
from ..layout import Placement, Segment, TensorSpec, cut_runs, row_major_index, stored_runs
from ._holding import HERE, Index
from ._state import Item, region_of


def segments_in(item: Item, index: Index, orders: Mapping[str, bool]) -> Iterator[Segment]:
    """What a part of an array holds of some tensors, in stored order where `orders` says so, else in row-major.

    Of a tensor that other mesh axes split, these are elements of the slice that the part is of; see `slice_of`.
    """
    if item.held is None:
        shape = tuple(getattr(item.leaf, "shape", ()))
        if item.name in orders:
            for run in runs_of(region_of(index, shape), shape):
                yield Segment(item.name, run.first, run.first + run.numel, HERE, run.at)
        return
    for s in item.held.segments(index):
        if (stored := orders.get(s.tensor)) is None:
            continue
        placement = item.held.placement(s.tensor)
        if stored or is_row_major(placement):
            yield s
            continue
        for first, at, numel in cut_runs(stored_runs(placement), s.start, s.stop):
            yield Segment(s.tensor, first, first + numel, HERE, s.offset + at - s.start)


def placement_of(item: Item, name: str) -> Placement:
    """The order in which a tensor of an item is stored; of one that other mesh axes split, a slice's."""
    if item.held is not None:
        return item.held.placement(name)
    return Placement(TensorSpec(name, item.tensors()[name].shape), 0)


def slice_of(item: Item, name: str, index: Index) -> tuple[int, ...]:
    """Where the slice of a tensor that a part of an array is of begins in the tensor; () if nothing splits it."""
    tensor = placement_of(item, name).tensor
    if item.held is None or not tensor.splits:
        return ()
    return tensor.slice_start(item.held.of.unit.coordinates(item.held.of.slab, index))


def row_major_indices(item: Item, name: str, index: Index, start: int, stop: int) -> np.ndarray:
    """Where stored elements of a part of an array are in the whole tensor, in row-major order."""
    placement = placement_of(item, name)
    at = row_major_index(placement, np.arange(start, stop))
    if not (first := slice_of(item, name, index)):
        return at
    dims = np.unravel_index(at, placement.tensor.shape)
    places = tuple(low + x for low, x in zip(first, dims, strict=True))
    return np.ravel_multi_index(places, placement.tensor.full_shape)


def is_row_major(placement: Placement) -> bool:
    return placement.storage == "row_major" and placement.axis_order is None


def is_sliced_alike(a: Placement, b: Placement) -> bool:
    """Whether other mesh axes split two tensors into the same slices, or neither."""
    return (a.tensor.splits and a.tensor.shape) == (b.tensor.splits and b.tensor.shape)


def is_alike(a: Placement, b: Placement) -> bool:
    """Whether two tensors of the same shape lie in the same order."""
    if (a.storage, a.axis_order) != (b.storage, b.axis_order):
        return False
    return a.storage == "row_major" or a.tensor.block == b.tensor.block


def run_numel(placement: Placement) -> int:
    """Elements that are surely stored together, on average."""
    shape = placement.tensor.shape
    if is_row_major(placement) or not placement.tensor.numel:
        return max(1, placement.tensor.numel)
    if placement.storage == "tiled":
        return min(placement.tensor.block.size[1], shape[-1])
    assert placement.axis_order is not None
    return shape[-1] if placement.axis_order[-1] == len(shape) - 1 else 1
