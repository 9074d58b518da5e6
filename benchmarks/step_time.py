"""Step time, memory and data movement of ragged FSDP against jit + NamedSharding and per-parameter gathers.

One Flax NNX transformer, AdamW in the step, donated. All methods run in one process, one step of each per round in
alternating order, and each is compared with the first one round by round: only such paired ratios mean something on
a machine that does other things too. The batch per device is constant.

    python benchmarks/step_time.py --devices 4 --variants scan --dtypes float32 --rounds 11
"""

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from baselines import AXIS, GPT, Block, Config, loss_fn, named_sharding, per_parameter, shard_by_largest_dim
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import ragged_jax as rj
from ragged_jax.fsdp import drop_unsharded
from ragged_jax.preflight import HloReport, hlo_report

MIB = 2**20


@dataclass(frozen=True)
class Arguments:
    """What to run.

    Attributes:
      devices: numbers of devices; the model's sizes are powers of two, so 3, 6 and 7 divide nothing.
      variants: layers stacked for a scan, or in a Python list.
      dtypes: of the computation; parameters are float32.
      methods: from `METHODS`; the first is the one to compare with.
      rounds: steps of each method, after two that are not counted. With 0 the programs are only compiled.
      batch: sequences per device.
      layers: of the model.
      out: a folder for the results, `step_time.json` and `step_time.md`.
    """

    devices: tuple[int, ...] = (4, 8, 3, 6, 7)
    variants: tuple[str, ...] = ("scan", "list")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    methods: tuple[str, ...] = ("named_sharding", "named_sharding_keep_all", "per_parameter", "ragged")
    rounds: int = 11
    batch: int = 2
    layers: int = 8
    out: Path | None = None


@dataclass(frozen=True)
class Row:
    """One method in one setting. Sizes per device; times in seconds; ratios to the first method, by round."""

    devices: int
    variant: str
    dtype: str
    method: str
    step: float | None
    ratio: tuple[float, float, float] | None  # quartiles
    compile: float
    temp_nbytes: int
    argument_nbytes: int
    state_nbytes: int  # of the whole state, unsharded
    collectives: dict[str, int]  # executed
    wire_nbytes: int
    moved_nbytes: int


def _ragged(model, mesh):
    stacked = Block if model.config.scan else None
    model = rj.fully_shard(model, mesh, axis=AXIS, units=Block, stacked=stacked)
    return model, rj.value_and_grad(loss_fn)


METHODS = {
    # the compiler shards; every layer under the checkpoint policy that ragged uses
    "named_sharding": lambda m, mesh: (shard_by_largest_dim(m, mesh), named_sharding(mesh, drop_unsharded)),
    # the same without a checkpoint: all activations are kept
    "named_sharding_keep_all": lambda m, mesh: (shard_by_largest_dim(m, mesh), named_sharding(mesh)),
    "per_parameter": lambda m, mesh: (shard_by_largest_dim(m, mesh), per_parameter(mesh, drop_unsharded)),
    "ragged": _ragged,
}


class Run:
    """A method, compiled."""

    def __init__(self, method: str, config: Config, mesh: jax.sharding.Mesh):
        model = GPT(config, rngs=nnx.Rngs(0))
        self.state_nbytes = 3 * sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        self.model, value_and_grad = METHODS[method](model, mesh)
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(3e-4), wrt=nnx.Param)

        def step(model, optimizer, tokens):
            loss, grads = value_and_grad(model, tokens)
            optimizer.update(model, grads)
            return loss

        self.function = nnx.jit(step, donate_argnums=(0, 1))
        self.times: list[float] = []

    def compile(self, tokens: jax.Array) -> HloReport:
        start = time.perf_counter()
        compiled = self.function.lower(self.model, self.optimizer, tokens).compile()
        self.compile_time = time.perf_counter() - start
        return hlo_report(getattr(compiled, "compiled", compiled))

    def step(self, tokens: jax.Array) -> float:
        start = time.perf_counter()
        loss = jax.block_until_ready(self.function(self.model, self.optimizer, tokens))
        self.times.append(time.perf_counter() - start)
        return float(loss)


def measure(args: Arguments, num_devices: int, variant: str, dtype: str) -> list[Row]:
    """All methods in one setting.

    Raises:
      AssertionError: their losses differ, so that they do not do the same work.
    """
    config = Config(layers=args.layers, scan=variant == "scan", dtype=jnp.dtype(dtype))
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    data = np.random.default_rng(0).integers(0, config.vocab, (num_devices * args.batch, config.seq + 1))
    tokens = jax.device_put(data.astype(np.int32), NamedSharding(mesh, PartitionSpec(AXIS)))
    runs = {method: Run(method, config, mesh) for method in args.methods}
    reports = {method: run.compile(tokens) for method, run in runs.items()}
    for number in range(args.rounds + 2 if args.rounds else 0):
        order = list(runs.values())[:: 1 if number % 2 else -1]
        losses = [run.step(tokens) for run in order]
        np.testing.assert_allclose(losses, losses[0], rtol=1e-5 if dtype == "float32" else 1e-2)
    rows = []
    first = np.array(runs[args.methods[0]].times[2:])
    for method, run in runs.items():
        report, times = reports[method], np.array(run.times[2:])
        row = Row(
            num_devices,
            variant,
            dtype,
            method,
            step=float(np.median(times)) if args.rounds else None,
            ratio=_quartiles(times / first) if args.rounds else None,
            compile=run.compile_time,
            temp_nbytes=report.temp_nbytes or 0,
            argument_nbytes=report.argument_nbytes or 0,
            state_nbytes=run.state_nbytes,
            collectives={kind: c.executed for kind, c in report.collectives.items()},
            wire_nbytes=report.wire_nbytes,
            moved_nbytes=report.total_moved_nbytes,
        )
        rows.append(row)
    return rows


HEADER = (
    "N", "layers", "dtype", "method", "step ms", "ratio [quartiles]", "compile s", "temp MiB", "argument MiB",
    "state share", "collectives run", "wire MiB", "moved MiB",
)  # fmt: skip


def _quartiles(x: np.ndarray) -> tuple[float, float, float]:
    low, middle, high = np.percentile(x, (25, 50, 75)).tolist()
    return low, middle, high


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    low, middle, high = row.ratio or (float("nan"),) * 3
    return (
        str(row.devices),
        row.variant,
        row.dtype,
        row.method,
        f"{row.step * 1e3:.0f}" if row.step else "-",
        f"{middle:.3f} [{low:.3f}, {high:.3f}]" if row.ratio else "-",
        f"{row.compile:.1f}",
        f"{row.temp_nbytes / MIB:.1f}",
        f"{row.argument_nbytes / MIB:.1f}",
        f"{row.argument_nbytes / row.state_nbytes:.1%}",
        f"{sum(row.collectives.values())}",
        f"{row.wire_nbytes / MIB:.1f}",
        f"{row.moved_nbytes / MIB:.1f}",
    )


def environment() -> dict[str, str]:
    """What the numbers depend on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "command": " ".join(["python", *sys.argv]),
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, {cpu}",
        "versions": f"jax {jax.__version__}, flax {flax.__version__}, optax {optax.__version__}, "
        f"ragged-jax {rj.__version__}, Python {platform.python_version()}",
    }


def write(folder: Path, rows: list[Row], args: Arguments) -> None:
    """The results as JSON and as a markdown table."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {**environment(), "batch per device": str(args.batch), "rounds": str(args.rounds)}
    content = {**about, "rows": [asdict(row) for row in rows]}
    (folder / "step_time.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = ["# Step time", "", *(f"- {key}: `{value}`" for key, value in about.items()), ""]
    lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    (folder / "step_time.md").write_text("\n".join(lines) + "\n")


def main(args: Arguments) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180)
    rows = []
    for variant in args.variants:
        for dtype in args.dtypes:
            for num_devices in args.devices:
                rows += measure(args, num_devices, variant, dtype)
                console.print(*(f"{'  '.join(cells(row))}" for row in rows[-len(args.methods) :]), sep="\n")
                if args.out:
                    write(args.out, rows, args)
    table = Table(*HEADER, title="one training step; sizes per device; ratio of step time to the first method")
    for row in rows:
        table.add_row(*cells(row), end_section=row.method == args.methods[-1])
    console.print(table)
    console.print(environment())


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
