"""Tensors that lie behind one another in memory as one, so that a kernel runs once for many of them."""

from collections.abc import Iterable, Mapping, Sequence
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
    return [_one(rows[low:high]) for low, high in _bounds(rows)]


def _continues(row: Row, after: Row) -> bool:
    return all(_chain(pair) for pair in zip(row, after, strict=True))


def _chain(xs: Sequence[torch.Tensor]) -> bool:
    """Whether contiguous tensors lie behind one another in one storage."""
    for x, y in pairwise(xs):
        if y.data_ptr() != x.data_ptr() + x.numel() * x.element_size() or x.dtype != y.dtype:
            return False
    return xs[0].untyped_storage().data_ptr() == xs[-1].untyped_storage().data_ptr()


def _one(rows: Sequence[Row]) -> Row:
    return rows[0] if len(rows) == 1 else tuple(_span(xs) for xs in zip(*rows, strict=True))


def _span(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    return xs[0].as_strided((sum(x.numel() for x in xs),), (1,))


class Runs:
    """What of some parameters stays where it is, joined once; gradients, which are new in every step, join quickly.

    Args:
      rows: by parameter, itself and tensors of its size, all contiguous.
    """

    def __init__(self, rows: Mapping[torch.Tensor, Row]):
        self._addresses = {p: [x.data_ptr() for x in row] for p, row in rows.items()}
        self._flat = {p: tuple(x.detach().view(-1) for x in row) for p, row in rows.items()}
        order = sorted((p for p in rows if p.numel()), key=lambda p: p.data_ptr())
        self._runs = [
            (order[low:high], _one([self._flat[p] for p in order[low:high]]))
            for low, high in _bounds([self._flat[p] for p in order])
        ]

    def are_of(self, rows: Mapping[torch.Tensor, Row]) -> bool:
        """Whether these tensors are still the ones that were joined."""
        found = self._addresses
        return all(p in found and found[p] == [x.data_ptr() for x in row] for p, row in rows.items())

    def with_gradients(self) -> list[Row]:
        """Rows of what was joined, with the gradients, contiguous, at the end."""
        done: list[Row] = []
        for members, row in self._runs:
            grads: list[torch.Tensor] = [p.grad for p in members]  # pyright: ignore[reportAssignmentType]
            if _chain(grads):
                done.append((*row, _span(grads).detach()))
            else:
                done += joined([(*self._flat[p], g.detach().view(-1)) for p, g in zip(members, grads, strict=True)])
        return done


def _bounds(rows: Sequence[Row]) -> Iterable[tuple[int, int]]:
    """Where runs of sorted rows start and stop."""
    breaks = (i for i, pair in enumerate(pairwise(rows), 1) if not _continues(*pair))
    return pairwise([0, *breaks, len(rows)] if rows else [])


def zeros_beside(parameters: Sequence[torch.Tensor], numels: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Zeros for each parameter, behind one another where the parameters are.

    Args:
      parameters: 1-D contiguous.
      numels: how many zeros for each.
      dtype: of the zeros.
    """
    order = sorted(range(len(parameters)), key=lambda i: parameters[i].data_ptr())
    made: dict[int, torch.Tensor] = {}
    for low, high in _bounds([(parameters[i],) for i in order]):
        members = order[low:high]
        flat = torch.zeros(sum(numels[i] for i in members), dtype=dtype, device=parameters[members[0]].device)
        made |= zip(members, flat.split([numels[i] for i in members]), strict=True)
    return [made[i] for i in range(len(parameters))]
