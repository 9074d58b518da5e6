"""Which dims of a tensor make a matrix, and where the matrices lie in its stored elements. No framework."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..layout import Placement, TensorSpec, tile_regions
from ..planner import Matrix
from ._tensor import Shape, Tensor


@dataclass(frozen=True)
class MatrixDims:
    """Which dims of a tensor a matrix optimizer multiplies over; all others are a batch of matrices.

    `optax.contrib.MuonDimensionNumbers` is taken in its place.

    Attributes:
      reduction: the dims that the layer sums over (its inputs), flattened to the rows of a matrix.
      output: the dims of its outputs, flattened to the columns.
      split: for projections fused along their outputs (queries, keys and values), how many equal matrices, or
        the number of columns of each. Each is orthogonalised alone.

    Example:
      >>> MatrixDims((0, 1, 2), 3)  # a convolution, height x width x in x out
      MatrixDims(reduction=(0, 1, 2), output=3, split=1)
    """

    reduction: int | tuple[int, ...] = -2
    output: int | tuple[int, ...] = -1
    split: int | tuple[int, ...] = 1


@dataclass(frozen=True)
class Form:
    """How the stored elements of an item, a part of a tensor that one device works on, are matrices.

    Attributes:
      item: the part, with its dims and the order in which they are stored, as a placement at 0.
      reduction, output: dims of it.
      columns: of each matrix along the outputs.
    """

    item: Placement
    reduction: tuple[int, ...]
    output: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return self.item.tensor.shape

    @property
    def numel(self) -> int:
        return self.item.tensor.numel

    @property
    def rows(self) -> int:
        return math.prod(self.shape[d] for d in self.reduction)

    @property
    def batch(self) -> int:
        return self.numel // (self.rows * sum(self.columns))

    @property
    def cost(self) -> int:
        """Multiply-adds of one Newton-Schulz step."""
        sides = [sorted((self.rows, width)) for width in self.columns]
        return self.batch * sum(short**2 * (2 * long + short) for short, long in sides)

    @property
    def stored_matrix(self) -> tuple[int, int, bool] | None:
        """`(rows, cols, transposed)` if the stored elements are one matrix, row by row; else None."""
        order: Shape = self.item.axis_order or tuple(range(len(self.shape)))
        if self.item.storage != "row_major" or self.batch > 1 or len(self.columns) > 1:
            return None
        if order == self.reduction + self.output:
            return self.rows, sum(self.columns), False
        return (sum(self.columns), self.rows, True) if order == self.output + self.reduction else None

    def matrix(self, tensor: str, index: int) -> Matrix:
        """What the planner is to know of item `index` of a tensor."""
        rows, cols, _ = self.stored_matrix or (self.rows, self.numel // max(1, self.rows), False)
        return Matrix(tensor, index, rows, cols, self.cost)


def as_dims(tensor: Tensor, dims: Any) -> tuple[tuple[int, ...], tuple[int, ...], int | tuple[int, ...]]:
    """Reduction and output dims of the tensor's full shape, and the split.

    Raises:
      ValueError: dims that the tensor lacks, that are named twice, or that run over the layers of a stack.
    """
    if hasattr(dims, "reduction_axis"):  # of optax
        dims = MatrixDims(dims.reduction_axis, dims.output_axis)
    ndim, given = len(tensor.shape), []
    for value in (dims.reduction, dims.output):
        values = tuple(value) if isinstance(value, Sequence) else (value,)
        if any(not -ndim <= d < ndim for d in values):
            raise ValueError(f"{tensor.name}: {dims} for a tensor of shape {tensor.shape}")
        given.append(tuple(d % ndim for d in values))
    reduction, output = given
    used = reduction + output
    if len(set(used)) != len(used) or not reduction or not output:
        raise ValueError(f"{tensor.name}: {dims} names a dim twice, or none, of a tensor of shape {tensor.shape}")
    if tensor.stack is not None and 0 in used:
        raise ValueError(f"{tensor.name}: {dims} runs over dim 0 of {tensor.shape}, which counts layers")
    width = math.prod(tensor.shape[d] for d in output)
    split = dims.split
    if (isinstance(split, int) and (split < 1 or width % split)) or (
        not isinstance(split, int) and (sum(split) != width or min(split) < 1)
    ):
        raise ValueError(f"{tensor.name}: split={split} of {width} outputs (shape {tensor.shape})")
    return reduction, output, split


def form_of(tensor: Tensor, dims: Any = None) -> Form:
    """What one device works on: the smallest part of the tensor that lies together and holds whole matrices.

    That is a member of a leading batch (a layer, an expert), or one layer. The items of a tensor follow one
    another in its stored elements.

    Args:
      tensor: the tensor.
      dims: its `MatrixDims`. None: an item is one layer, whatever is in it.
    """
    lead = 0 if tensor.stack is None else 1
    shape = tensor.layer_shape
    placement = tensor.placement or Placement(TensorSpec(tensor.name, shape, tensor.dtype), 0)
    order, spec = placement.axis_order, placement.tensor
    if dims is None:
        item = Placement(TensorSpec("", shape, spec.dtype, spec.block), 0, placement.storage, order)
        everything = tuple(range(len(shape)))
        return Form(item, everything, (), (1,))
    reduction, output, split = as_dims(tensor, dims)
    reduction, output = (tuple(d - lead for d in part) for part in (reduction, output))
    batch = min(reduction + output)  # leading dims that are no part of a matrix
    if (
        (order is not None and order[:batch] != tuple(range(batch)))
        or 0 in shape
        or (placement.storage == "tiled" and (batch != len(shape) - 2 or len(tile_regions(spec)) > 1))
    ):
        batch = 0
    inner = None if order is None else tuple(d - batch for d in order[batch:])
    block = spec.block if placement.storage == "tiled" else TensorSpec("", ()).block
    item = Placement(TensorSpec("", shape[batch:], spec.dtype, block), 0, placement.storage, inner)
    reduction, output = (tuple(d - batch for d in part) for part in (reduction, output))
    width = math.prod(item.tensor.shape[d] for d in output)
    columns = (width // split,) * split if isinstance(split, int) else tuple(split)
    return Form(item, reduction, output, columns)
