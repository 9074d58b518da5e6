"""Tensors that lie behind one another in memory as one, so that a kernel runs once for many of them."""

from collections.abc import Sequence
from itertools import pairwise

import torch

Row = tuple[torch.Tensor, ...]


def joined(rows: Sequence[Row]) -> list[Row]:
    """Rows of tensors; those that continue each other in every column become one.

    Nothing else is touched: what lies between two tensors, padding or a frozen parameter, stays out.

    Args:
      rows: each of the same number of 1-D contiguous tensors.

    Example:
      >>> x, y = torch.arange(8), torch.arange(8)
      >>> [tuple(len(part) for part in row) for row in joined([(x[2:4], y[:2]), (x[:2], y[4:6]), (x[4:], y[2:6])])]
      [(2, 2), (6, 6)]
    """
    if len(rows) < 2:
        return list(rows)
    rows = sorted(rows, key=lambda row: row[0].data_ptr())
    starts = [0, *(i for i, (row, after) in enumerate(pairwise(rows), 1) if not _continues(row, after)), len(rows)]
    return [_one(rows[low:high]) for low, high in pairwise(starts)]


def _continues(row: Row, after: Row) -> bool:
    return all(
        y.data_ptr() == x.data_ptr() + x.numel() * x.element_size()
        and x.dtype == y.dtype
        and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        for x, y in zip(row, after, strict=True)
    )


def _one(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    columns = zip(*rows, strict=True)
    return tuple(xs[0].as_strided((sum(x.numel() for x in xs),), (1,)) for xs in columns)


def zeros_beside(parameters: Sequence[torch.Tensor], numels: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Zeros for each parameter, behind one another where the parameters are.

    Args:
      parameters: 1-D contiguous.
      numels: how many zeros for each.
      dtype: of the zeros.
    """
    order = sorted(range(len(parameters)), key=lambda i: parameters[i].data_ptr())
    made: dict[int, torch.Tensor] = {}
    starts = [
        k for k, i in enumerate(order) if k == 0 or not _continues((parameters[order[k - 1]],), (parameters[i],))
    ]
    for low, high in pairwise([*starts, len(order)]):
        members = order[low:high]
        flat = torch.zeros(sum(numels[i] for i in members), dtype=dtype, device=parameters[members[0]].device)
        made |= zip(members, flat.split([numels[i] for i in members]), strict=True)
    return [made[i] for i in range(len(parameters))]
