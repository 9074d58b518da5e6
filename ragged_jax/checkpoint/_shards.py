"""Between the shards of a layout and a checkpoint: the same for JAX, torch and numpy.

A shard of a slab is a flat array, or `[layers, elements]` for a stacked bucket, padding included. Checkpoints name
the tensors in it, without padding and each layer on its own: layer 3 of `blocks/mlp/kernel` in the stacked bucket
`blocks` is `blocks/3/mlp/kernel`, which is also what it is called in a list of layers.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from ..layout import Bucket, Buffer, Layout, Placement, Slab, can_be_tiled
from ._batch import Batch
from ._bytes import numpy_dtype
from ._checkpoint import Checkpoint
from ._manifest import TensorEntry
from ._memory import empty
from ._write import Part


def layer_name(bucket: Bucket, tensor: str, layer: int) -> str:
    """What a checkpoint calls one layer's tensor of a bucket."""
    if bucket.stack is None:
        return tensor
    head = f"{bucket.name}/" if bucket.name else ""
    if not tensor.startswith(head):
        return f"{tensor}/{layer}"
    return f"{head}{layer}/{tensor.removeprefix(head)}"


def join(*steps: str) -> str:
    """Parts of a path, with slashes between those that are not empty."""
    return "/".join(step for step in steps if step)


def slab_tensors(
    bucket: Bucket,
    slab: Slab,
    *,
    prefix: str = "",
    suffix: str = "",
    dtype: str | None = None,
    attributes: Mapping[str, str] | None = None,
) -> dict[str, TensorEntry]:
    """The tensors of a slab as a checkpoint declares them, by name. One that other mesh axes split is whole there.

    Args:
      bucket, slab: where they lie.
      prefix, suffix: what their names begin and end with: of a moment, `opt/mu`.
      dtype: of an array that lies as the slab does, but is of another type, such as quantised codes.
      attributes: for all of them.
    """
    return {
        join(prefix, layer_name(bucket, p.tensor.name, layer), suffix): TensorEntry(
            dtype or slab.dtype,
            p.tensor.full_shape,
            tile=None if p.tensor.splits else _tile(p),
            axis_order=None if p.tensor.splits else p.axis_order,
            attributes=dict(attributes or {}),
        )
        for p in slab.placements
        for layer in range(bucket.num_copies)
    }


def _tile(placement: Placement) -> tuple[int, int] | None:
    if placement.storage != "tiled" or not can_be_tiled(placement.tensor):
        return None
    (height, width), (rows, cols) = placement.tensor.block.size, placement.tensor.shape[-2:]
    return min(height, rows), min(width, cols)


def shard_parts(
    layout: Layout, k: int, buffers: Mapping[Buffer, np.ndarray], *, prefix: str = "", suffix: str = ""
) -> Iterator[Part]:
    """What shard `k` saves: views of its buffers, by `(bucket, slab)`. Buffers that are not given are left out."""
    for piece in layout.shard(k):
        if (buffer := buffers.get((piece.bucket, piece.slab))) is None:
            continue
        bucket = layout.bucket(piece.bucket)
        layers = _layers(buffer, bucket)
        for layer in range(bucket.num_copies):
            name = join(prefix, layer_name(bucket, piece.tensor.name, layer), suffix)
            data = layers[layer, piece.offset : piece.offset + piece.stop - piece.start]
            yield Part(name, ((piece.start, piece.stop),), data, bucket.name)


def read_shard(
    checkpoint: Checkpoint, layout: Layout, k: int, *, prefix: str = "", suffix: str = ""
) -> dict[Buffer, np.ndarray]:
    """The buffers of shard `k`, by `(bucket, slab)`, padding zero. Nothing but this shard is read.

    Args:
      checkpoint: that holds the tensors, saved with any layout.
      layout: to follow now.
      k: the shard.
      prefix, suffix: of the tensors' names in the checkpoint.

    Raises:
      CheckpointError: a tensor is missing, has another shape, or is damaged.
      ValueError: one was saved with another dtype.
    """
    buffers = {}
    share = (layout.shares or (1,) * layout.num_shards)[k]
    for bucket in layout.buckets:
        for slab in bucket.slabs:
            shape = (slab.shard_numel * share,) if bucket.stack is None else (bucket.stack, slab.shard_numel * share)
            buffers[bucket.name, slab.name] = empty(shape, numpy_dtype(slab.dtype))
    _clear_padding(layout, k, buffers)
    fill_shard(checkpoint, layout, k, buffers, prefix=prefix, suffix=suffix)
    return buffers


def _clear_padding(layout: Layout, k: int, buffers: Mapping[Buffer, np.ndarray]) -> None:
    """Zeros in buffers of shard `k` where no tensor lies."""
    ends = dict.fromkeys(buffers, 0)
    for piece in layout.shard(k):
        if (at := (piece.bucket, piece.slab)) in ends:
            _layers(buffers[at], layout.bucket(piece.bucket))[:, ends[at] : piece.offset] = 0
            ends[at] = piece.offset + piece.stop - piece.start
    for (bucket, slab), end in ends.items():
        _layers(buffers[bucket, slab], layout.bucket(bucket))[:, end:] = 0


def _layers(buffer: np.ndarray, bucket: Bucket) -> np.ndarray:
    """A row for each layer."""
    return buffer.reshape(bucket.num_copies, buffer.size // max(1, bucket.num_copies))


def fill_shard(
    checkpoint: Checkpoint,
    layout: Layout,
    k: int,
    buffers: Mapping[Buffer, np.ndarray],
    *,
    prefix: str = "",
    suffix: str = "",
    cast: bool = False,
    batch: Batch | None = None,
) -> None:
    """Fills buffers of shard `k` in place; what no tensor lies in is left as it is.

    Args:
      buffers: contiguous arrays by `(bucket, slab)`; others are left out.
      cast: whether tensors that were saved with another dtype are converted; otherwise they are an error.
      batch: that the shard is read with. None: it is read now.
    """
    if batch is None:
        with checkpoint.batch() as own:
            fill_shard(checkpoint, layout, k, buffers, prefix=prefix, suffix=suffix, cast=cast, batch=own)
        return
    for piece in layout.shard(k):
        if (buffer := buffers.get((piece.bucket, piece.slab))) is None:
            continue
        bucket, _, placement = layout.locate(piece.tensor.name)
        layers, numel = _layers(buffer, bucket), piece.stop - piece.start
        for layer in range(bucket.num_copies):
            name = join(prefix, layer_name(bucket, piece.tensor.name, layer), suffix)
            out = layers[layer, piece.offset : piece.offset + numel]
            checkpoint.read_part(name, piece.start, out, placement, cast=cast, batch=batch)
