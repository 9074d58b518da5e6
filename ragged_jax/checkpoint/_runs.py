"""Runs: elements that follow each other both in a tensor and in memory or a file."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from ._manifest import Region


class Run(NamedTuple):
    """`numel` elements of a tensor from `first` on, in its order, that lie at `at` in something."""

    first: int
    at: int
    numel: int


def runs_of(region: Region, shape: tuple[int, ...], at: int = 0) -> list[Run]:
    """The runs of a region whose elements lie in a row from `at` on.

    Example:
      >>> runs_of(((0, 2), (1, 3)), (4, 5))
      [Run(first=1, at=0, numel=2), Run(first=6, at=2, numel=2)]
    """
    if len(region) == 1:
        (start, stop), *_ = region
        return [Run(start, at, stop - start)] if start < stop else []
    if any(start == stop for start, stop in region):
        return []
    last = len(region)  # the dims from here on are whole
    while last and region[last - 1] == (0, shape[last - 1]):
        last -= 1
    whole = math.prod(shape[last:])
    if last == 0:
        return [Run(0, at, whole)]
    start, stop = region[last - 1]
    numel = (stop - start) * whole
    strides = [math.prod(shape[dim + 1 :]) for dim in range(last - 1)]
    runs = []
    for index in product(*(range(*span) for span in region[: last - 1])):
        first = sum(i * stride for i, stride in zip(index, strides, strict=True)) + start * whole
        runs.append(Run(first, at + len(runs) * numel, numel))
    return runs


def meet(held: Sequence[Run], wanted: Sequence[Run], shift: int = 0) -> Iterator[tuple[int, int, int]]:
    """`(at held, at wanted, numel)` of what both have, where element `i` of the one is `i - shift` of the other.

    Args:
      held: by rising `first`, disjoint.
      wanted: any runs.
      shift: how much further on the held tensor the same element is.
    """
    firsts = [run.first for run in held]
    for want in wanted:
        start, stop = want.first + shift, want.first + want.numel + shift
        for at in range(max(0, bisect_right(firsts, start) - 1), len(held)):
            have = held[at]
            if have.first >= stop:
                break
            low, high = max(start, have.first), min(stop, have.first + have.numel)
            if low < high:
                yield have.at + low - have.first, want.at + low - start, high - low
