"""What the compilers of H100 and TPU make of one training step, against jit + NamedSharding: no accelerator needed.

The step is AdamW on float32 masters, computed in bfloat16, one sequence a device (eight images for the ViT); each
layer keeps its input and nothing else for the backward pass, in every variant. `options` are `rj.compiler_options`,
given to both. With `head kept` the output matrix stays gathered between forward and backward, as planned schedules
have it; with `two at once` two collectives may be under way at a time. On TPU the plan stores q, k and v with their
outputs in front (`axis_order`), as the products want them. Temporary memory is `memory_analysis()`'s, on TPU what its
compiler reports to allot in HBM besides arguments: there `memory_analysis()` counts gaps between buffers twice.
Nothing is ever allocated: parameters are shapes.

    python benchmarks/aot.py --out benchmarks/results/aot
"""

import argparse
import fcntl
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # a compiler without its machine asks nobody for metadata
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # the lock is for chips, and here are none

import aot_models as models
import jax
import numpy as np
import optax
from aot_models import Config, abstract_params, batch_of
from baselines import AXIS, largest_divisible_dim
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from untile import NEEDS

import ragged_jax as rj
from ragged_jax.preflight import hlo_report, overlap_report

MIB = 2**20
DUMPED = tempfile.TemporaryDirectory(prefix="aot-")  # goes when the program ends
H100 = Path(__file__).parent / "h100_target_config.txt"
TPU = {
    "v5p": {16: "2x2x4", 64: "4x4x4", 256: "4x8x8"},
    "v6e": {16: "4x4", 64: "8x8", 256: "16x16"},
}
MODELS = {c.name: c for c in (models.LLAMA, models.GPT_OSS, models.VIT, models.ODD)} | {
    "llama-8b, 8 layers": replace(models.LLAMA, layers=8),
    "llama-8b, 4 unrolled": replace(models.LLAMA, layers=4, scan=False),
    "small": Config("small", 4, 256, 1024, 2001, 4, 2, 64, seq=256),
}
VARIANTS = ("named_sharding", "ragged", "named_sharding + options", "ragged + options", "ragged, head kept + options")
VARIANTS += ("ragged, two at once + options",)
PRECISION = rj.MixedPrecision("bfloat16", reduce_dtype="bfloat16")
NOTHING = jax.checkpoint_policies.nothing_saveable


@dataclass(frozen=True)
class Row:
    """One compiled program. Bytes per device; `seconds` is the TPU compiler's own estimate."""

    target: str
    devices: int
    model: str
    variant: str
    temp_nbytes: int
    argument_nbytes: int
    state_nbytes: int  # parameters and moments, unsharded
    moved_nbytes: int
    weights_moved_nbytes: int
    collectives: dict[str, tuple[int, int, int]]  # static, executed, bytes
    exposed: int  # collectives in loops that no product runs beside, executed
    exposed_nbytes: int
    loop: list[tuple[str, bool, int, int]]  # kind, backward, arrays, products beside it
    compile_seconds: float
    seconds: float | None

    @property
    def key(self) -> tuple:
        return self.target, self.devices, self.model, self.variant


def mesh_of(target: str, num_devices: int, axis_type: AxisType) -> Mesh:
    """The devices of a machine that is not here."""
    try:
        if target == "h100":
            shape = f"1x{num_devices // 8}x8" if num_devices % 8 == 0 else f"1x1x{num_devices}"
            found = topologies.get_topology_desc(
                platform="cuda", topology_name="h100", topology=shape, target_config=H100.read_text()
            )
        else:
            found = topologies.get_topology_desc(platform="tpu", topology_name=f"{target}:{TPU[target][num_devices]}")
    except Exception as error:
        package, remedy = NEEDS["cuda" if target == "h100" else "tpu"]
        raise SystemExit(f"{target} needs its compiler, {package}: {remedy} ({error})") from None
    return Mesh(np.array(found.devices), (AXIS,), axis_types=(axis_type,))


def pinned(state: Any, params: Any, mesh: Mesh) -> Any:
    """Abstract optimizer state, sharded as the parameters of the same shape are."""
    known = {x.shape: x.sharding for x in jax.tree.leaves(params)}
    rest = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=known.get(x.shape, rest)), state)


def ragged(c: Config, target: str, num_devices: int, keep_head: bool = False) -> tuple[Any, Callable, Mesh]:
    mesh = mesh_of(target, num_devices, AxisType.Explicit)
    how = {"units": ("embed", "layers" if c.scan else "layers/*", "head"), "stacked": "layers" if c.scan else None}
    order = {} if target == "h100" else {"axis_order": {"layers/*[qkv]": (1, 0)}}
    plan = rj.plan(abstract_params(c), num_devices, profile=target, **order, **how)
    params = rj.shard_tree(abstract_params(c), mesh, axis=AXIS, plan=plan, precision=PRECISION, **how)
    layer = partial(rj.unsharded, policy=NOTHING)

    def unit(f):
        """Of the last unit the gathered copy is needed again at once: it may be kept for backward."""
        return rj.unsharded(f, reshard=not (keep_head and f.__name__ == "head"))

    def loss(params, x, y):
        return models.loss(c, params, x, y, unit=unit, layer=layer, pin=lambda x: x)

    return params, rj.value_and_grad(loss), mesh


def named_sharding(c: Config, target: str, num_devices: int) -> tuple[Any, Callable, Mesh]:
    mesh = mesh_of(target, num_devices, AxisType.Auto)

    def place(path, x):
        spec = largest_divisible_dim(x.shape, num_devices, c.scan and path[0].key == "layers")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree_util.tree_map_with_path(place, abstract_params(c))
    pin = partial(lax.with_sharding_constraint, shardings=NamedSharding(mesh, PartitionSpec(AXIS)))

    def layer(f):
        return jax.checkpoint(f, policy=NOTHING, prevent_cse=not c.scan)

    def loss(params, x, y):
        return models.loss(c, params, x, y, unit=lambda f: f, layer=layer, pin=pin)

    def value_and_grad(*args):
        loss_value, grads = jax.value_and_grad(loss)(*args)
        return loss_value, jax.tree.map(lambda g, p: lax.with_sharding_constraint(g, p.sharding), grads, params)

    return params, value_and_grad, mesh


def lower(c: Config, variant: str, target: str, num_devices: int) -> Any:
    make = partial(ragged, keep_head="head kept" in variant) if variant.startswith("ragged") else named_sharding
    params, value_and_grad, mesh = make(c, target, num_devices)
    optimizer = optax.adamw(3e-4)

    def step(params, state, x, y):
        loss, grads = value_and_grad(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state

    split = NamedSharding(mesh, PartitionSpec(AXIS))
    batch = [jax.ShapeDtypeStruct(shape, dtype, sharding=split) for shape, dtype in batch_of(c, num_devices)]
    state = pinned(jax.eval_shape(optimizer.init, params), params, mesh)
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, *batch)


def options_of(c: Config, variant: str, target: str, num_devices: int) -> dict[str, Any]:
    params, backend = ragged(c, target, num_devices)[0], "gpu" if target == "h100" else "tpu"
    return rj.compiler_options(params, backend, parallel_collectives=1 + ("two at once" in variant))


def weight_shapes(c: Config, num_devices: int) -> set[tuple[int, ...]]:
    """Dims, sorted, of weights and of their shards, of one layer and of all."""
    shapes = set()
    for x in jax.tree.leaves(abstract_params(c)):
        for shape in (x.shape, x.shape[1:]):
            if len(shape) > 1:
                dims = [(*shape[:i], d // num_devices, *shape[i + 1 :]) for i, d in enumerate(shape)]
                shapes |= {tuple(sorted(d for d in s if d != 1)) for s in [shape, *dims]}
    return shapes


def allotted_on_tpu(argument_nbytes: int) -> int | None:
    """Bytes of temporary memory by the TPU compiler's own report, which it wrote beside the program."""
    found = None
    for file in Path(DUMPED.name).glob("*memory-usage-report.txt"):
        if ".jit_step." in file.name and (total := re.search(r"^Total bytes: (\d+)", file.read_text(), re.MULTILINE)):
            found = int(total[1]) - argument_nbytes
        file.unlink()
    return found


def measure(target: str, num_devices: int, name: str, variant: str, dump: Path | None) -> Row:
    c = MODELS[name]
    lowered = lower(c, variant, target, num_devices)
    options = options_of(c, variant, target, num_devices) if variant.endswith("options") else None
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    took = round(time.perf_counter() - start, 1)
    if dump:
        (dump / f"{target}-{num_devices}-{name}-{variant}.txt".replace(" ", "_")).write_text(compiled.as_text())
    report, overlap = hlo_report(compiled), overlap_report(compiled)
    shapes = weight_shapes(c, num_devices)
    weights = sum(m.nbytes for m in overlap.moves if m.unit or tuple(sorted(d for d in m.shape if d != 1)) in shapes)
    seconds = (compiled.cost_analysis() or {}).get("optimal_seconds")
    exposed = overlap.exposed_in_loops
    return Row(
        target,
        num_devices,
        name,
        variant,
        (allotted_on_tpu(report.argument_nbytes or 0) if target in TPU else None) or report.temp_nbytes or 0,
        report.argument_nbytes or 0,
        3 * sum(x.size * 4 for x in jax.tree.leaves(abstract_params(c))),
        report.total_moved_nbytes,
        weights,
        {kind: (found.static, found.executed, found.nbytes) for kind, found in report.collectives.items()},
        sum(x.executed for x in exposed),
        sum(x.executed * x.nbytes for x in exposed),
        [(x.kind, x.backward, x.num_arrays, x.num_matmuls) for x in overlap.collectives if x.in_loop],
        took,
        seconds if seconds and seconds > 0 else None,
    )


KINDS = {
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-reduce": "AR",
    "collective-permute": "CP",
    "all-to-all": "A2A",
}


def table(rows: list[Row]) -> str:
    heads = ("model", "devices", "variant", "temp MiB", "arguments MiB", "of the state", "weights moved MiB")
    heads += ("all moved MiB", "collectives: static / run", "exposed in loops (MiB)", "compile s", "estimate ms")
    lines = []
    for target in dict.fromkeys(row.target for row in rows):
        lines += [
            "",
            f"## {target}",
            "",
            f"| {' | '.join(heads)} |",
            "|---|--:|---|" + "--:|" * 5 + "---|" + "--:|" * 3,
        ]
        lines += [_line(row) for row in rows if row.target == target]
    return "\n".join(lines)


def _line(row: Row) -> str:
    found = ", ".join(f"{KINDS.get(k, k)} {static} / {run}" for k, (static, run, _) in row.collectives.items())
    cells = [row.model, str(row.devices), row.variant]
    cells += [f"{n / MIB:,.0f}" for n in (row.temp_nbytes, row.argument_nbytes)]
    cells += [f"{100 * row.argument_nbytes / row.state_nbytes:.2f} %"]
    cells += [f"{n / MIB:,.0f}" for n in (row.weights_moved_nbytes, row.moved_nbytes)]
    cells += [found, f"{row.exposed} ({row.exposed_nbytes / MIB:,.0f})", f"{row.compile_seconds}"]
    cells += [f"{row.seconds * 1e3:.1f}" if row.seconds else ""]
    return f"| {' | '.join(cells)} |"


def write(out: Path, new: Row) -> None:
    """Adds a row to those of earlier runs, which may be going on."""
    with open(out.with_suffix(".json"), "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        known = {row.key: row for d in (json.loads(text)["rows"] if text else []) if (row := Row(**d))}
        known[new.key] = new
        order = [*MODELS]
        rows = sorted(
            known.values(), key=lambda r: (r.target, order.index(r.model), r.devices, VARIANTS.index(r.variant))
        )
        packages = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt")
        versions = {
            p: importlib.metadata.version(p) for p in packages if list(importlib.metadata.distributions(name=p))
        }
        file.truncate(0)
        json.dump({"versions": versions, "rows": [asdict(row) for row in rows]}, file, indent=1)
        said = ", ".join(map(" ".join, versions.items()))
        how = "`python benchmarks/aot.py --out benchmarks/results/aot` (rows of several runs are kept together)"
        said += "\n\n" + (__doc__ or "").split("\n", 2)[2].strip()
        doc = f"# One training step, compiled ahead of time\n\n{how}\n\n{said}\n"
        out.with_suffix(".md").write_text(f"{doc}{table(rows)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=("h100", *TPU), help="default: all")
    parser.add_argument("--devices", action="append", type=int, help="default: 8 to 1024 of H100, 16 to 256 of TPU")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all but small")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: all")
    parser.add_argument("--small", action="store_true", help="a small model on 16 v5p: a minute")
    parser.add_argument("--dump", type=Path, help="a folder for the optimised HLO")
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    if args.small:
        args.target, args.devices, args.model = ["v5p"], [16], ["small"]
    if args.target != ["h100"]:
        flags = f"--xla_dump_to={DUMPED.name} --xla_dump_hlo_as_text"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    for target in args.target or ("h100", *TPU):
        for num_devices in args.devices or ((8, 64, 256, 1024) if target == "h100" else TPU[target]):
            for name in args.model or [name for name in MODELS if name != "small"]:
                for variant in args.variant or VARIANTS:
                    try:
                        row = measure(target, num_devices, name, variant, args.dump)
                    except Exception as error:
                        print(f"FAILED {target} {num_devices} {name} {variant}: {str(error)[:600]}", file=sys.stderr)
                        continue
                    print(_line(row), flush=True)
                    if args.out:
                        write(args.out, row)


if __name__ == "__main__":
    main()
