"""The padding rules of other systems, as formulas over shapes: elements on each device.

Each takes the tensors of one group (one transformer layer, one flat buffer). Sources: PyTorch
`torch/distributed/fsdp` (FSDP1 flat parameters; FSDP2 `fully_shard` per parameter), DeepSpeed ZeRO-3,
Megatron-LM `megatron_fsdp` (stable `param_and_grad_buffer.py` rule and the experimental rule). Where a block is
asked for, "rows" means rows times the block, an extension that keeps each rule's own logic.
"""

import math
from collections.abc import Sequence

from ragged_jax.layout import TensorSpec


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def fsdp1(tensors: Sequence[TensorSpec], num_shards: int, itemsize: int = 2) -> int:
    """One FlatParameter with original parameters: each starts 16-byte aligned, the end padded to the shards.
    Cuts anywhere, so it counts for element blocks only."""
    end = 0
    for tensor in tensors:
        end = up(end, max(1, 16 // itemsize)) + tensor.numel
    return -(-end // num_shards)


def fsdp1_flat(tensors: Sequence[TensorSpec], num_shards: int) -> int:
    """One FlatParameter without original parameters: no alignment. Cuts anywhere."""
    return -(-sum(tensor.numel for tensor in tensors) // num_shards)


def zero3(tensors: Sequence[TensorSpec], num_shards: int) -> int:
    """DeepSpeed ZeRO-3: every parameter by itself, padded to the shards. Cuts anywhere."""
    return sum(-(-tensor.numel // num_shards) for tensor in tensors)


def fsdp2(tensors: Sequence[TensorSpec], num_shards: int) -> int:
    """Every parameter cut on dim 0 in chunks of `ceil(rows / shards)`, forced to whole blocks; every rank
    stores the first chunk's size. Stacked experts are cut on dim 1 when there are more shards than experts
    (torchtitan's rule), hypothetical where that dim does not divide."""
    total = 0
    for tensor in tensors:
        if len(tensor.shape) == 0 or tensor.numel == 0:
            total += tensor.numel
            continue
        dim = tensor.block.dim if tensor.block.kind == "rows" and len(tensor.shape) > 2 else 0
        if dim and num_shards <= tensor.shape[0]:
            # Whole experts on each device.
            total += -(-tensor.shape[0] // num_shards) * (tensor.numel // tensor.shape[0])
            continue
        length = tensor.shape[dim]
        chunk = min(length, up(-(-length // num_shards), _block_length(tensor, dim)))
        total += chunk * (tensor.numel // length)
    return total


def _block_length(tensor: TensorSpec, dim: int) -> int:
    """Indices of `dim` in one block."""
    behind = math.prod(tensor.shape[dim + 1 :])
    return max(1, min(tensor.shape[dim], -(-tensor.granularity // behind)))


def named_sharding(tensors: Sequence[TensorSpec], num_shards: int) -> int:
    """`jax.jit` with `NamedSharding`: a dim is cut evenly or the tensor is replicated. With element blocks any
    dim will do; else dim 0 in whole blocks."""
    total = 0
    for tensor in tensors:
        if tensor.granularity == 1 or not tensor.shape:
            even = any(size % num_shards == 0 and size for size in tensor.shape)
        else:
            even = tensor.shape[0] % num_shards == 0 and tensor.numel // num_shards % tensor.granularity == 0
        total += tensor.numel // num_shards if even else tensor.numel
    return total


Layout = tuple[int, list[tuple[int, int]]]  # size of the buffer, (start, index of the tensor)


def stable_chunk(sizes: Sequence[tuple[int, int]]) -> int:
    """The chunk that the stable rule finds for one bucket of `(numel, row numel)`; it depends on the order."""
    by_row = sorted(sizes, key=lambda size: -size[1])
    chunk = by_row[0][1]
    for n, r in by_row:
        if not (r == chunk or (chunk % r == 0 and n % chunk == 0) or n < chunk):
            chunk = math.lcm(chunk, r)
    return chunk


def megatron_stable_layout(sizes: Sequence[tuple[int, int]], num_shards: int) -> Layout:
    """Megatron-FSDP's stable rule for one bucket of `(numel, row numel)`: chunk, regulars, fragments, tail."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i][1])
    chunk = stable_chunk(sizes)
    regulars = [i for i in order if sizes[i][0] >= chunk]
    fragments = [i for i in order if sizes[i][0] < chunk]
    return _walk(sizes, regulars, fragments, chunk, num_shards, aligned=False)


def megatron_experimental_layout(sizes: Sequence[tuple[int, int]], num_shards: int) -> Layout:
    """The experimental rule: the chunk is the least common multiple of all rows, tensors stay in their order,
    and fragments start at rows."""
    order = range(len(sizes))
    chunk = math.lcm(*(r for _, r in sizes))
    regulars = [i for i in order if sizes[i][0] >= chunk]
    fragments = sorted((i for i in order if sizes[i][0] < chunk), key=lambda i: -sizes[i][0])
    return _walk(sizes, regulars, fragments, chunk, num_shards, aligned=True)


def _walk(
    sizes: Sequence[tuple[int, int]],
    regulars: list[int],
    fragments: list[int],
    chunk: int,
    num_shards: int,
    *,
    aligned: bool,
) -> Layout:
    placed: list[tuple[int, int]] = []
    regulars, fragments = list(regulars), list(fragments)
    position = 0

    def fill(gap: int, stop: int | None) -> int:
        """Puts fragments into `[gap, stop)`, in order, greedily; returns where the last ends."""
        for i in list(fragments):
            n, r = sizes[i]
            start = up(gap, r) if aligned else gap
            if stop is None or start + n <= stop:
                placed.append((start, i))
                fragments.remove(i)
                gap = start + n
        return gap

    while regulars:
        i = regulars.pop(0)
        n = sizes[i][0]
        placed.append((position, i))
        rest = n % chunk
        if not rest:
            position += n
            continue
        gap, position = position + n, position + (n // chunk + 1) * chunk
        stop = position
        for j in regulars:
            if 0 < (q := sizes[j][0] % chunk) <= chunk - rest:
                placed.append((position - q, j))
                stop = position - q
                position += sizes[j][0] // chunk * chunk
                regulars.remove(j)
                break
        fill(gap, stop)
    position = fill(position, None)
    return up(position, chunk * num_shards), placed


def megatron(tensors: Sequence[TensorSpec], num_shards: int, rule) -> int | None:
    """Elements on each device under one of the two layouts, experts in a bucket of their own; None where a
    block is cut, so that the rule does not count."""
    total = 0
    for bucket in (
        [t for t in tensors if "expert" in t.name and t.numel],
        [t for t in tensors if "expert" not in t.name and t.numel],
    ):
        if not bucket:
            continue
        size, placed = rule([(t.numel, t.granularity) for t in bucket], num_shards)
        shard = size // num_shards
        for start, i in placed:
            if not _is_whole(start, bucket[i].numel, bucket[i].granularity, shard):
                return None
        total += shard
    return total


def _is_whole(start: int, numel: int, granularity: int, shard: int) -> bool:
    first = shard - start % shard
    if first >= numel:
        return True
    return first % granularity == 0 and (first + shard >= numel or shard % granularity == 0)
