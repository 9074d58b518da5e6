"""The report of a plan as a table for people."""

from rich.table import Table

from ._report import Plan


def size(nbytes: int | float) -> str:
    """Bytes with a binary prefix: `1.50 MiB`."""
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {prefix}" if prefix == "B" else f"{nbytes:.2f} {prefix}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def plan_table(plan: Plan) -> Table:
    layout = plan.layout
    table = Table(
        title=f"{layout.num_shards} shards, {len(layout.tensors)} tensors, layout {layout.fingerprint}",
        caption=f"padding {100 * plan.padding_fraction:.2f} %, lower bound {100 * plan.bound_fraction:.2f} %",
    )
    table.add_column("bucket")
    for heading in ("sole", "packed", "unsharded", "per device", "padding"):
        table.add_column(heading, justify="right")
    for bucket in plan.buckets:
        payload = bucket.payload_nbytes
        padding = layout.num_shards * bucket.shard_nbytes / payload - 1 if payload else 0

        table.add_row(
            bucket.name or "(root)",
            str(bucket.num_sole),
            str(bucket.num_packed),
            size(payload),
            size(bucket.shard_nbytes),
            f"{100 * padding:.2f} %",
        )
    table.add_section()
    table.add_row("total", "", "", size(layout.payload_nbytes), size(layout.shard_nbytes), "")
    return table
