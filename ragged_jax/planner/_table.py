"""The report of a plan as a table for people, and what other reports need for theirs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from ._report import BucketReport, Plan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def size(nbytes: int | float) -> str:
    """Bytes with a binary prefix: `1.50 MiB`."""
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {prefix}" if prefix == "B" else f"{nbytes:.2f} {prefix}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def plain(table: "RenderableType", width: int = 110) -> str:
    """What `rich` can print as text without colours, for `print`; no line ends in blanks."""
    from rich.console import Console

    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def plan_table(plan: Plan, with_bound: bool = True) -> "Table":
    """A plan's report as a `rich` table: a line for each kind of bucket, with how many are alike, and the total."""
    from rich.box import SIMPLE_HEAD  # flax brings rich along; it is needed here only
    from rich.table import Table

    layout = plan.layout
    table = Table(
        title=f"{layout.num_shards} shards, {len(layout.tensors)} tensors, layout {layout.fingerprint}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("bucket", overflow="fold")  # the one that gives way on a narrow terminal
    headings = ["number", "sole", "packed", "in all", "per device", "padding", "bound"]
    for heading in headings if with_bound else headings[:-1]:
        table.add_column(heading, justify="right", no_wrap=True)
    for bucket, count in _alike(plan.buckets):
        table.add_row(
            bucket.name or "(root)",
            str(count),
            str(bucket.num_sole),
            str(bucket.num_packed),
            size(bucket.payload_nbytes),
            size(bucket.shard_nbytes),
            _padding(bucket.shard_nbytes, bucket, layout.num_parts),
            *([_padding(bucket.bound_nbytes, bucket, layout.num_parts)] if with_bound else []),
        )
    table.add_section()
    table.add_row(
        "total",
        str(len(plan.buckets)),
        str(sum(bucket.num_sole for bucket in plan.buckets)),
        str(sum(bucket.num_packed for bucket in plan.buckets)),
        size(sum(bucket.payload_nbytes for bucket in plan.buckets)),
        size(plan.shard_nbytes),
        f"{100 * plan.padding_fraction:.2f} %",
        *([f"{100 * plan.bound_fraction:.2f} %"] if with_bound else []),
    )
    return table


def _padding(shard_nbytes: int, bucket: BucketReport, num_parts: int) -> str:
    if not bucket.payload_nbytes:
        return "0.00 %"
    return f"{100 * (num_parts * shard_nbytes / bucket.payload_nbytes - 1):.2f} %"


def _alike(buckets: Sequence[BucketReport]) -> list[tuple[BucketReport, int]]:
    """The first bucket of each run of buckets with the same figures, and how long the run is."""
    runs = groupby(buckets, key=lambda bucket: replace(bucket, name=""))
    return [(members[0], len(members)) for _, run in runs if (members := list(run))]
