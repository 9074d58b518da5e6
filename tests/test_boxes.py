"""Ranges of a flattened tensor as boxes."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_jax.layout import boxes


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start, stop = sorted(draw(st.integers(0, math.prod(shape))) for _ in range(2))
    return shape, start, stop


@given(ranges())
def test_boxes_are_the_range(drawn):
    shape, start, stop = drawn
    index = np.arange(math.prod(shape)).reshape(shape)
    found = boxes(shape, start, stop)
    parts = [index[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1) for box in found]
    assert np.concatenate([np.arange(0), *parts]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert [box.numel for box in found] == [part.size for part in parts]


@given(ranges())
def test_there_are_no_fewer(drawn):
    """Against the shortest chain of contiguous boxes from start to stop."""
    shape, start, stop = drawn
    numel = math.prod(shape)

    def is_box(low: int, high: int) -> bool:
        places = np.array(np.unravel_index(np.arange(low, high), shape or (1,)))
        return math.prod(np.ptp(places, axis=1) + 1) == high - low

    @cache
    def fewest(low: int) -> int:
        return 0 if low == stop else 1 + min(fewest(end) for end in range(low + 1, stop + 1) if is_box(low, end))

    if numel <= 24:
        assert len(boxes(shape, start, stop)) == fewest(start)


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_is_refused(bounds):
    with pytest.raises(ValueError, match=r"of a tensor of shape \(2, 3\)"):
        boxes((2, 3), *bounds)


def test_nothing_has_no_boxes():
    assert boxes((0, 4), 0, 0) == boxes((3,), 2, 2) == ()
    assert [tuple(box) for box in boxes((), 0, 1)] == [((), ())]
