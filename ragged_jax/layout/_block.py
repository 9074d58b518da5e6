"""What must stay on one device: the block granularity of a tensor."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ._errors import STRICT

Kind = Literal["elements", "rows", "tile", "whole"]
_NUM_SIZES = {"elements": 1, "rows": 1, "tile": 2, "whole": 0}


@dataclass(frozen=True, slots=True)
class Block:
    """The piece of a tensor that no device boundary may cut.

    Built by `elements`, `rows`, `tile` and `whole`. A tensor with fewer than two dims has no rows and no
    tiles: there `rows` and `tile` mean single elements.

    Attributes:
      kind: which rule.
      size: its sizes: elements, rows, or (rows, columns).
      dim: for `rows`, the tensor dim that the rows run along. The dims before it are stacks (of experts, of
        heads); a block never reaches over two members of a stack.
    """

    __pydantic_config__ = STRICT

    kind: Kind
    size: tuple[int, ...] = ()
    dim: int = 0

    def __post_init__(self):
        if self.kind not in _NUM_SIZES:
            raise ValueError(f"unknown block kind {self.kind!r}; choose from {', '.join(_NUM_SIZES)}")
        if len(self.size) != _NUM_SIZES[self.kind]:
            raise ValueError(f"a block of kind {self.kind!r} takes {_NUM_SIZES[self.kind]} sizes, got {self.size}")
        for value in self.size:
            if type(value) is not int or value < 1:
                raise ValueError(f"the sizes of a block are integers of at least 1, got {self.size}")
        if type(self.dim) is not int or self.dim < 0 or (self.dim and self.kind != "rows"):
            raise ValueError(f"only rows(k, dim=d) has a dim, an integer of at least 0; got {self.dim!r}")

    def __repr__(self):
        sizes = ", ".join(map(str, self.size))
        return f"{self.kind}({sizes}, dim={self.dim})" if self.dim else f"{self.kind}({sizes})"

    def granularity(self, shape: tuple[int, ...]) -> int:
        """Elements between two legal cuts of a row-major tensor of this shape, from its start.

        A tile in row-major storage spans whole rows, so `tile(r, c)` costs `r` rows of the last dim. Where
        the rows of a stack do not divide by `k`, one member of the stack stays whole: cuts are then at
        multiples of the member, which no block reaches over.

        Example:
          >>> rows(32).granularity((1024, 256))
          8192
          >>> tile(32, 32).granularity((8, 1000, 64))
          64000
        """
        numel = math.prod(shape)
        if numel == 0:
            return 1
        if self.kind == "whole":
            return numel
        if self.kind == "elements":
            return min(self.size[0], numel)
        if len(shape) < 2:
            return 1
        dim = self.dim if self.kind == "rows" else len(shape) - 2
        if dim >= len(shape):
            raise ValueError(f"{self!r} names dim {dim}, a tensor of shape {shape} has {len(shape)}")
        length, row_numel = shape[dim], math.prod(shape[dim + 1 :])
        num_rows = min(self.size[0], length)
        if dim and length % num_rows:
            num_rows = length
        return num_rows * row_numel

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape holds at least one such block (else it is kept whole)."""
        if self.kind == "whole" or math.prod(shape) == 0:
            return True
        if self.kind == "elements":
            return self.size[0] <= math.prod(shape)
        if len(shape) < 2:
            return True
        if self.kind == "rows":
            return self.dim < len(shape) and self.size[0] <= shape[self.dim]
        return self.size[0] <= shape[-2] and self.size[1] <= shape[-1]


def elements(n: int) -> Block:
    """Blocks of `n` consecutive elements in row-major order, e.g. `elements(256)` for 8-bit Adam."""
    return Block("elements", (n,))


def rows(k: int, dim: int = 0) -> Block:
    """Blocks of `k` consecutive indices of `dim`, with all that lies behind them."""
    return Block("rows", (k,), dim)


def tile(r: int, c: int) -> Block:
    """`r` x `c` tiles of the last two dims, e.g. `tile(128, 128)` for block-scaled fp8."""
    return Block("tile", (r, c))


def whole() -> Block:
    """The tensor is not cut at all."""
    return Block("whole")


BlockRule = Block | Mapping[str, Block]


def block_for(name: str, rule: BlockRule) -> Block:
    """The block that a rule gives to the tensor called `name`.

    Args:
      name: the tensor's path, with slashes.
      rule: one block for all, or a mapping from shell-style patterns of the path to blocks, where the first
        pattern that matches wins and a tensor that nothing matches may be cut anywhere.

    Example:
      >>> block_for("blocks/0/mlp/up/kernel", {"*/embedding": rows(1), "*/kernel": tile(32, 32)})
      tile(32, 32)
    """
    if isinstance(rule, Block):
        return rule
    if not isinstance(rule, Mapping):
        raise TypeError(f"block={rule!r} is neither a Block such as rows(32) nor a mapping from patterns to blocks")
    for pattern, block in rule.items():
        if not isinstance(block, Block):
            raise TypeError(f"block[{pattern!r}] is {block!r}, not a Block such as rows(32)")
        if fnmatchcase(name, pattern):
            return block
    return elements(1)
