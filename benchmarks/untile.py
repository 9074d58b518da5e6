"""What it costs to read a tensor back from its slab: natural, flat or tile by tile, on H100 and TPU.

Unshards one [4096, 14336] tensor with this runtime's own code, multiplies 2,048 tokens a device by it, and compiles
that ahead of time: no accelerator is needed, only its compiler.

    python benchmarks/untile.py --out benchmarks/results/untile
"""

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # a compiler without its machine asks nobody for metadata

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragged_jax.fsdp._unit import Unit
from ragged_jax.fsdp._unshard import unshard_unit
from ragged_jax.layout import Bucket, Layout, Placement, Slab, TensorSpec, elements, tile
from ragged_jax.preflight import hlo_report

SHAPE = (4096, 14336)
TOKENS = 2048  # a device
NUMEL = SHAPE[0] * SHAPE[1]
TILES = ((8, 128), (16, 128), (32, 32), (128, 128))
MIB = 2**20
H100 = Path(__file__).parent / "h100_target_config.txt"
TARGETS = {
    "v5p": {"platform": "tpu", "topology_name": "v5p:2x2x4"},
    "v6e": {"platform": "tpu", "topology_name": "v6e:4x4"},
    "h100": {"platform": "cuda", "topology_name": "h100", "topology": "1x1x8"},
}
NEEDS = {
    "tpu": ("libtpu", "pip install 'ragged-jax[aot-tpu]'"),
    "cuda": (
        "jax-cuda12-pjrt",
        f"pip install --no-deps jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__} "
        "nvidia-cuda-nvcc-cu12",
    ),
}


@dataclass(frozen=True)
class Row:
    """One compiled program. Bytes per device; `seconds` is the TPU compiler's own estimate."""

    target: str
    dtype: str
    program: str
    storage: str
    temp_nbytes: int
    moved_nbytes: dict[str, int]
    seconds: float | None
    compile_seconds: float

    @property
    def total_moved_nbytes(self) -> int:
        return sum(self.moved_nbytes.values())


def devices_of(target: str) -> list[Any]:
    """Descriptions of the devices of a machine that is not here."""
    options = dict(TARGETS[target])
    platform = options.pop("platform")
    package, remedy = NEEDS[platform]
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"{target} needs its compiler, {package}, which is not installed: {remedy}") from None
    if platform == "cuda":
        options["target_config"] = H100.read_text()
    return list(topologies.get_topology_desc(platform=platform, **options).devices)


def slabs(dtype: str, num_shards: int) -> Iterator[tuple[str, Slab]]:
    """The tensor stored in every way, each without padding."""
    rows = SHAPE[0] // num_shards
    whole = Placement(TensorSpec("w", SHAPE, dtype, elements(1)), 0)
    yield "natural", Slab("w", dtype, rows, SHAPE[1], (whole,), sole=True)
    yield "flat", Slab("flat", dtype, NUMEL // num_shards, 1, (whole,))
    for height, width in TILES:
        placement = Placement(TensorSpec("w", SHAPE, dtype, tile(height, width)), 0, "tiled")
        yield f"{height}x{width}", Slab("tiles", dtype, NUMEL // num_shards, 1, (placement,))


def programs(unit: Unit) -> Iterator[tuple[str, Any, tuple]]:
    """(name, function, abstract arguments) of the product, and of it with its gradients."""
    (slab,) = unit.bucket.slabs
    batch = PartitionSpec(unit.axis)
    sharding = NamedSharding(unit.mesh, batch)

    def product(shards, x):
        return x @ unshard_unit(unit, shards)["w"]

    def gradient(shards, x, dy):
        y, pullback = jax.vjp(product, shards, x)
        return y, *pullback(dy)

    def mapped(f, *specs, out):
        return jax.jit(jax.shard_map(f, mesh=unit.mesh, in_specs=specs, out_specs=out, axis_names={unit.axis}))

    spec = {slab.name: unit.spec(slab)}
    shards = {slab.name: jax.ShapeDtypeStruct(unit.shape(slab), slab.dtype, sharding=unit.sharding(slab))}
    tokens = TOKENS * unit.num_shards
    x, dy = (jax.ShapeDtypeStruct((tokens, n), jnp.dtype(slab.dtype), sharding=sharding) for n in SHAPE)
    yield "forward", mapped(product, spec, batch, out=batch), (shards, x)
    yield "gradient", mapped(gradient, spec, batch, batch, out=(batch, spec, batch)), (shards, x, dy)


def measure(target: str, mesh: Mesh, dtypes: list[str], only: str, dump: Path | None) -> Iterator[Row]:
    for dtype in dtypes:
        for storage, slab in slabs(dtype, mesh.size):
            if storage != "natural" and only not in storage:
                continue
            layout = Layout(mesh.size, (Bucket("", (slab,)),)).check()
            for name, f, args in programs(Unit(layout.bucket(""), mesh, ("fsdp",))):
                start = time.perf_counter()
                compiled = f.lower(*args).compile()
                took = round(time.perf_counter() - start, 2)
                if dump:
                    (dump / f"{target}-{dtype}-{name}-{storage.replace(' ', '_')}.txt").write_text(compiled.as_text())
                report = hlo_report(compiled)
                seconds = (compiled.cost_analysis() or {}).get("optimal_seconds")
                seconds = seconds if seconds and seconds > 0 else None  # v6e's compiler gives a negative one at times
                bytes_ = report.temp_nbytes or 0, dict(report.moved_nbytes)
                yield Row(target, dtype, name, storage, *bytes_, seconds, took)


def table(rows: list[Row]) -> str:
    """Markdown: a table for each target, against the natural shape."""
    lines = []
    for target in dict.fromkeys(row.target for row in rows):
        shape = TARGETS[target].get("topology", TARGETS[target]["topology_name"])
        lines += ["", f"## {target}: `{shape}`", ""]
        lines += ["| dtype | program | storage | temp MiB | moved MiB | by | estimate us | against natural |"]
        lines += ["|---|---|---|---:|---:|---|---:|---|"]
        for row in rows:
            if row.target == target:
                lines.append(_line(row, next((r for r in rows if _same(r, row) and r.storage == "natural"), row)))
    return "\n".join(lines)


def _same(a: Row, b: Row) -> bool:
    return (a.target, a.dtype, a.program) == (b.target, b.dtype, b.program)


def _line(row: Row, natural: Row) -> str:
    by = ", ".join(f"{op} {n / MIB:.0f}" for op, n in row.moved_nbytes.items())
    temp = (row.temp_nbytes - natural.temp_nbytes) / MIB
    moved = (row.total_moved_nbytes - natural.total_moved_nbytes) / MIB
    against = f"{temp:+.0f} MiB temp, {moved:+.0f} MiB moved"
    if row.seconds and natural.seconds:
        against += f", {row.seconds / natural.seconds:.2f}x"
    cells = [row.dtype, row.program, row.storage, f"{row.temp_nbytes / MIB:.0f}"]
    cells += [f"{row.total_moved_nbytes / MIB:.0f}", by, f"{row.seconds * 1e6:.0f}" if row.seconds else "", against]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"), help="default: both")
    parser.add_argument("--storage", default="", help="only those whose name contains this, and natural")
    parser.add_argument("--dump", type=Path, help="a folder for the optimised HLO")
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    meshes = {target: Mesh(np.array(devices_of(target)), ("fsdp",)) for target in args.target or TARGETS}
    rows = []
    for target, mesh in meshes.items():
        for row in measure(target, mesh, args.dtype or ["float32", "bfloat16"], args.storage, args.dump):
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    packages = ("jax", "jaxlib", *(package for package, _ in NEEDS.values()))
    versions = {p: importlib.metadata.version(p) for p in packages if list(importlib.metadata.distributions(name=p))}
    command = "python benchmarks/untile.py " + " ".join(sys.argv[1:])
    said = ", ".join(map(" ".join, versions.items()))
    text = f"# Reading a [4096, 14336] tensor back from its slab\n\n`{command}`\n\n{said}\n{table(rows)}\n"
    print(text)
    if args.out:
        args.out.with_suffix(".md").write_text(text)
        document = {"command": command, "versions": versions, "rows": [asdict(row) for row in rows]}
        args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
