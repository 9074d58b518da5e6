"""One Muon update over devices against `optax.contrib.muon` under jit + NamedSharding.

Both get the same gradients of the matrices of a transformer and the same options; their updates are compared. One
step of each per round, in alternating order, each round a ratio: on a shared machine only the ratios mean something.
Virtual devices share the cores, so that the time is that of all devices' work together.

    python benchmarks/muon.py --devices 4 8 --rounds 9 --out benchmarks/results
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import numpy as np
import optax
import tyro
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from step_time import environment

import ragged_jax as rj
from ragged_jax.optim import scale_by_muon
from ragged_jax.optim._forms import form_of
from ragged_jax.optim._owners import owners_of
from ragged_jax.optim._routes import dims_of
from ragged_jax.optim._tensors import tensors_of
from ragged_jax.preflight import hlo_report

MIB = 2**20


@dataclass(frozen=True)
class Arguments:
    """What to run.

    Attributes:
      devices: numbers of devices.
      layers: of the model; each has matrices of d x 3d, d x d, d x 4d and 4d x d.
      widths: d.
      rounds: steps of each method, after two that are not counted.
      out: a folder for the results, `muon.json` and `muon.md`.
    """

    devices: tuple[int, ...] = (4, 8)
    layers: int = 8
    widths: tuple[int, ...] = (256,)
    rounds: int = 9
    out: Path | None = None


@dataclass(frozen=True)
class Row:
    """One method in one setting. Sizes per device; times in seconds; ratios to the first method, by round."""

    devices: int
    width: int
    method: str
    step: tuple[float, float, float]
    ratio: tuple[float, float, float]
    collectives: dict[str, int]
    num_collectives: int
    wire_nbytes: int
    temp_nbytes: int
    compile: float
    imbalance: float | None


def matrices(layers: int, d: int, scale: float = 1.0) -> dict:
    rng = np.random.default_rng(0)
    sizes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    return {
        f"layer{i:02}": {k: scale * rng.normal(size=s).astype(np.float32) for k, s in sizes.items()}
        for i in range(layers)
    }


def measure(args: Arguments, num: int, d: int) -> list[Row]:
    mesh = jax.make_mesh((num,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num])
    params, grads = matrices(args.layers, d), matrices(args.layers, d, 1e-3)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    usual = jax.tree.map(lambda x: jax.device_put(x, sharding), (params, grads))
    tree = rj.shard_tree(params, mesh, axis="fsdp", units="*")
    ours = tree, rj.shard_like(grads, tree)
    theirs = optax.contrib.scale_by_muon(weight_dimension_numbers=lambda p: jax.tree.map(_dims, p))
    theirs = optax.chain(theirs, optax.contrib._muon.scale_by_shape(lambda p: jax.tree.map(_dims, p)))  # type: ignore
    runs = {
        "optax.contrib.muon, NamedSharding": (theirs, usual),
        "ragged": (scale_by_muon(bias_correction=True), ours),
    }
    compiled, times, out = {}, {}, {}
    with jax.set_mesh(mesh):
        for name, (tx, (p, g)) in runs.items():
            state = tx.init(p)
            pins = jax.tree.map(lambda x: x.sharding, (g, state))
            start = time.perf_counter()
            step = jax.jit(tx.update, out_shardings=pins).lower(g, state).compile()
            compiled[name] = (step, g, state, time.perf_counter() - start)
            times[name] = []
        for number in range(args.rounds + 2):
            for name in list(compiled)[:: 1 if number % 2 else -1]:
                step, g, state, _ = compiled[name]
                start = time.perf_counter()
                out[name] = jax.block_until_ready(step(g, state))[0]
                times[name].append(time.perf_counter() - start)
    first, second = (out[name] for name in runs)
    want, got = jax.tree.map(np.asarray, first), rj.full_params(second)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max()), got, want)
    leaves = next(x for x in jax.tree.leaves(compiled["ragged"][2], is_leaf=_knows) if _knows(x)).leaves
    base = np.array(times[next(iter(times))][2:])
    rows = []
    for name, (step, _, _, seconds) in compiled.items():
        report, taken = hlo_report(step), np.array(times[name][2:])
        row = Row(
            num,
            d,
            name,
            _quartiles(taken),
            _quartiles(taken / base),
            {kind: c.executed for kind, c in report.collectives.items()},
            report.num_executed,
            report.wire_nbytes,
            report.temp_nbytes or 0,
            seconds,
            imbalance_of(leaves) if name == "ragged" else None,
        )
        rows.append(row)
    return rows


def _dims(_) -> optax.contrib.MuonDimensionNumbers:
    return optax.contrib.MuonDimensionNumbers()


def _knows(x) -> bool:
    return hasattr(x, "leaves") and hasattr(x, "mu")


def imbalance_of(leaves) -> float:
    """The largest share of the work over the mean."""
    forms = tuple((at, form_of(t, dims_of(t))) for at, t in enumerate(tensors_of(leaves)))
    return max(owners.plan.imbalance for owners in owners_of(leaves, forms))


def _quartiles(x: np.ndarray) -> tuple[float, float, float]:
    low, middle, high = np.percentile(x, (25, 50, 75)).tolist()
    return low, middle, high


HEADER = (
    "N",
    "d",
    "method",
    "step ms",
    "ratio [quartiles]",
    "collectives",
    "MiB sent",
    "temp MiB",
    "compile s",
    "max/mean work",
)


def cells(r: Row) -> tuple[str, ...]:
    kinds = ", ".join(f"{n} {kind}" for kind, n in r.collectives.items())
    return (
        str(r.devices),
        str(r.width),
        r.method,
        f"{r.step[1] * 1e3:.0f}",
        f"{r.ratio[1]:.3f} [{r.ratio[0]:.3f}, {r.ratio[2]:.3f}]",
        f"{r.num_collectives} ({kinds})",
        f"{r.wire_nbytes / MIB:.1f}",
        f"{r.temp_nbytes / MIB:.1f}",
        f"{r.compile:.1f}",
        "" if r.imbalance is None else f"{r.imbalance:.3f}",
    )


def main(args: Arguments) -> None:
    rows, about = [], {}
    for d in args.widths:
        for num in args.devices:
            rows += measure(args, num, d)
            print(*("  ".join(cells(row)) for row in rows[-2:]), sep="\n", flush=True)
            about = {**environment(), "layers": args.layers, "rounds": args.rounds, "load": os.getloadavg()[0]}
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                content = {**about, "rows": [asdict(row) for row in rows]}
                (args.out / "muon.json").write_text(json.dumps(content, indent=1) + "\n")
                lines = ["# Muon", "", *(f"- {key}: `{value}`" for key, value in about.items()), ""]
                lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
                lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
                (args.out / "muon.md").write_text("\n".join(lines) + "\n")
    print(about)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
