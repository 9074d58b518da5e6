"""Layouts from files, and stacked layers as the list that they are in torch."""

from dataclasses import replace
from pathlib import Path

from ragged_jax.checkpoint import Checkpoint, CheckpointDirectory, CheckpointError, layer_name
from ragged_jax.layout import Bucket, Layout


def load_layout(path: str | Path, prefix: str = "model") -> Layout:
    """The layout in a file, or that of a checkpoint, for `fully_shard(module, plan=...)`.

    It is for one number of ranks. Checkpoints restore on any other without it.

    Args:
      path: of a layout file, of a checkpoint's folder, or of a folder of checkpoints, whose latest is meant.
      prefix: of a checkpoint's layouts, that of the tensors whose names begin so.

    Raises:
      LayoutError: it is none, or not a sound one; every fault is named.
      CheckpointError: the checkpoint is damaged, or has no such layout.
    """
    path = Path(path)
    if not path.is_dir():
        return Layout.from_json(path.read_bytes()).check()
    steps = CheckpointDirectory(path)
    with steps.open() if steps.steps() else Checkpoint(path) as checkpoint:
        if prefix not in checkpoint.layouts:
            raise CheckpointError(f"{path} has no layout of {prefix!r}; it has {sorted(checkpoint.layouts)}")
        return checkpoint.layouts[prefix].check()


def unstacked(layout: Layout) -> Layout:
    """A layout with each stack of layers as a list of buckets.

    Nothing moves: what a rank holds of layer `i` is row `i` of what it holds of the stack.
    """
    if all(bucket.stack is None for bucket in layout.buckets):
        return layout
    buckets = (
        bucket if bucket.stack is None else _layer(bucket, layer)
        for bucket in layout.buckets
        for layer in range(bucket.num_copies)
    )
    return replace(layout, buckets=tuple(buckets))


def _layer(bucket: Bucket, layer: int) -> Bucket:
    def called(name: str) -> str:
        return layer_name(bucket, name, layer)

    slabs = []
    for slab in bucket.slabs:
        placements = tuple(replace(p, tensor=replace(p.tensor, name=called(p.tensor.name))) for p in slab.placements)
        slabs.append(replace(slab, name=called(slab.name) if slab.sole else slab.name, placements=placements))
    return Bucket(f"{bucket.name}/{layer}" if bucket.name else str(layer), tuple(slabs))
