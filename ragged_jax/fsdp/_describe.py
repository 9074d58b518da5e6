"""What a sharded model is made of, bucket by bucket, for people and as data."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..layout import Slab
from ..planner import plain, size
from ._parts import Part, parts_of
from ._precision import MixedPrecision
from ._quantised import packed_nbytes

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class BucketDescription:
    """One bucket of a sharded model.

    Attributes:
      name: its path; empty for the root.
      slabs: what it consists of.
      stack: of how many layers, for one that is scanned.
      payload_nbytes: of its tensors, without padding, all layers.
      padding_nbytes: over all devices.
      device_nbytes: that each device holds of it.
      gathered_nbytes: that each device holds while it is unsharded, one layer of a stack, in the dtype of the gather.
      wire_nbytes: that a gather brings together, one layer of a stack: fewer where weights travel quantised.
      dtypes: of its tensors.
      precision: the dtypes of its collectives and of its work.
      reshard: whether gathered weights are dropped after the forward pass; None where `unsharded` decides.
      tied: tensors with several names, all of them.
    """

    name: str
    slabs: tuple[Slab, ...]
    stack: int | None
    payload_nbytes: int
    padding_nbytes: int
    device_nbytes: int
    gathered_nbytes: int
    wire_nbytes: int
    dtypes: tuple[str, ...]
    precision: MixedPrecision
    reshard: bool | None
    tied: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Description:
    """A sharded model as it lies on its mesh; `str` gives a table, and so does printing it with `rich`.

    Attributes:
      buckets: the root first.
      mesh: the size of each mesh axis.
      axes: the mesh axes that split the batch; the last one shards, the others replicate.
      fingerprint: of the layout.
    """

    buckets: tuple[BucketDescription, ...]
    mesh: tuple[tuple[str, int], ...]
    axes: tuple[str, ...]
    fingerprint: str

    @property
    def device_nbytes(self) -> int:
        """Bytes of parameters on each device."""
        return sum(bucket.device_nbytes for bucket in self.buckets)

    def __rich__(self) -> "Group":
        from rich.box import SIMPLE_HEAD  # flax brings rich along; it is needed here only
        from rich.console import Group
        from rich.table import Table

        mesh = ", ".join(f"{axis} {length}" for axis, length in self.mesh)
        over = self.axes[-1] + "".join(f", replicated over {axis}" for axis in self.axes[:-1])
        rows = list(_alike(self.buckets))
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("bucket", overflow="fold")  # the one that gives way on a narrow terminal
        for heading in ("number", "sole", "packed", "per device", "padding", "gathered", "then"):
            table.add_column(heading, justify="right", no_wrap=True)
        for bucket, count in rows:
            table.add_row(*_row(bucket, count))
        table.add_section()
        padding, payload = (sum(getattr(b, f"{x}_nbytes") for b in self.buckets) for x in ("padding", "payload"))
        kinds = map(sum, zip(*(_kinds(bucket) for bucket in self.buckets), strict=True))
        total = (len(self.buckets), *kinds, size(self.device_nbytes), _percent(padding, payload))
        table.add_row("total", *map(str, total))
        title = f"mesh of {mesh}, sharded over {over}, layout {self.fingerprint}"
        return Group(title, table, *_notes(rows), *(f"tied: {' = '.join(n)}" for b in self.buckets for n in b.tied))

    def __str__(self):
        return plain(self.__rich__())


def describe(model: Any) -> Description:
    """What a sharded model is made of: for each bucket its slabs, bytes, padding, dtypes and policies.

    Args:
      model: a sharded pytree or a fully sharded Flax module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from ragged_jax.fsdp import shard_tree
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> tree = shard_tree({"w": jnp.ones((1000, 64)), "b": jnp.zeros(5)}, mesh, axis="fsdp")
      >>> [(b.payload_nbytes, b.dtypes) for b in describe(tree).buckets]
      [(256020, ('float32',))]
    """
    from ._generic import get_layout

    if not (parts := parts_of(model)):
        raise TypeError(f"{type(model).__name__} is not sharded; use `fully_shard` or `shard_tree` first")
    unit = parts[0].unit
    return Description(
        tuple(_bucket(part) for part in parts),
        tuple(unit.mesh.shape.items()),
        unit.axes,
        get_layout(model).fingerprint,
    )


def _bucket(part: Part) -> BucketDescription:
    unit, bucket = part.unit, part.unit.bucket
    held = unit.share * bucket.shard_nbytes
    return BucketDescription(
        name=bucket.name,
        slabs=bucket.slabs,
        stack=bucket.stack,
        payload_nbytes=bucket.payload_nbytes,
        padding_nbytes=unit.num_shards * held - bucket.payload_nbytes,
        device_nbytes=held,
        gathered_nbytes=sum(_gathered(part, slab) for slab in bucket.slabs),
        wire_nbytes=sum(_wire(part, slab) for slab in bucket.slabs),
        dtypes=tuple(sorted({slab.dtype for slab in bucket.slabs})),
        precision=unit.precision,
        reshard=part.reshard,
        tied=tuple((name, *others) for name, others in part.aliases.items()),
    )


def _gathered(part: Part, slab: Slab) -> int:
    import jax.numpy as jnp

    dtype = part.unit.precision.param_dtype
    cast = dtype is not None and jnp.issubdtype(slab.dtype, jnp.floating)
    itemsize = jnp.dtype(dtype if cast else slab.dtype).itemsize
    return part.unit.num_shards * part.unit.share * slab.shard_numel * itemsize


def _wire(part: Part, slab: Slab) -> int:
    import jax.numpy as jnp

    if part.unit.precision.gather_dtype is None or not jnp.issubdtype(slab.dtype, jnp.floating):
        return _gathered(part, slab)
    return part.unit.num_shards * packed_nbytes(part.unit.share * slab.shard_numel, part.unit.precision.gather_block)


def _kinds(bucket: BucketDescription) -> tuple[int, int]:
    """How many tensors have a slab of their own, and how many share one."""
    sole = sum(slab.sole for slab in bucket.slabs)
    return sole, sum(len(slab.placements) for slab in bucket.slabs) - sole


def _row(bucket: BucketDescription, count: int) -> list[str]:
    return [
        (bucket.name or "(root)") + (f" x {bucket.stack}" if bucket.stack is not None else ""),
        str(count),
        *map(str, _kinds(bucket)),
        size(bucket.device_nbytes),
        _percent(bucket.padding_nbytes, bucket.payload_nbytes),
        size(bucket.gathered_nbytes),
        {None: "as called", True: "dropped", False: "kept"}[bucket.reshard],
    ]


def _notes(rows: list[tuple[BucketDescription, int]]) -> Iterator[str]:
    """What the table has no room for: dtypes and precision of buckets, labels, and names for the same tensor."""
    kinds: dict[str, list[str]] = {}
    wire: dict[str, int] = {}
    labels: dict[str, int] = {}
    for bucket, count in (row for row in rows if row[0].slabs):
        kind, others = _dtypes(bucket), f" and {count - 1} like it" if count > 1 else ""
        kinds.setdefault(kind, []).append((bucket.name or "(root)") + others)
        if bucket.precision.gather_dtype:
            wire[kind] = max(wire.get(kind, 0), bucket.wire_nbytes)
        for slab in bucket.slabs:
            if slab.placements and (label := slab.placements[0].tensor.label):  # the same for all of a slab
                whole = sum(each.shard_nbytes for each in bucket.slabs) or 1  # all may be empty
                labels[label] = labels.get(label, 0) + count * (bucket.device_nbytes * slab.shard_nbytes // whole)
    for kind, names in kinds.items():
        at_most = f" (at most {size(wire[kind])})" if kind in wire else ""
        yield f"{'all buckets' if len(kinds) == 1 else ', '.join(names)}: {kind}{at_most}"
    for label, nbytes in labels.items():
        yield f"label {label}: {size(nbytes)} per device"


def _dtypes(bucket: BucketDescription) -> str:
    precision, text = bucket.precision, ", ".join(bucket.dtypes)
    text += f"; gathered as {precision.param_dtype}" if precision.param_dtype else ""
    text += f"; gradients reduced as {precision.reduce_dtype}" if precision.reduce_dtype else ""
    return text + (f"; {precision.gather_dtype} on the wire" if precision.gather_dtype else "")


def _percent(padding: int, payload: int) -> str:
    return f"{100 * padding / payload:.2f} %" if payload else "0.00 %"


def _alike(buckets: tuple[BucketDescription, ...]) -> Iterator[tuple[BucketDescription, int]]:
    """The first of each run of buckets with the same figures, and how long the run is."""

    def figures(bucket: BucketDescription) -> tuple:
        kinds = tuple((slab.sole, slab.dtype, slab.rows, slab.width) for slab in bucket.slabs)
        return replace(bucket, name="", slabs=(), tied=()), kinds

    for _, run in groupby(buckets, key=figures):
        members = list(run)
        yield members[0], len(members)
