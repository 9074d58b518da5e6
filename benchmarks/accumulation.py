"""What gradient accumulation costs: collectives and temporary memory, from the optimised HLO for 4 CPU devices.

python benchmarks/accumulation.py
"""

import os
from typing import Literal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import jax
import numpy as np
from baselines import AXIS, GPT, Block, Config, loss_fn
from flax import nnx

import ragged_jax as rj
from ragged_jax.preflight import hlo_report

CONFIG = Config(layers=8, width=128, ff=640, heads=4, vocab=512, seq=64)
SEQUENCES = 4  # on each device


def main() -> None:
    mesh = jax.make_mesh((4,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    print("| microbatches | reduce | gathers | reduce-scatters | temporary memory |\n|---:|---|---:|---:|---:|")
    ways: tuple[tuple[int, Literal["once", "each"]], ...]
    ways = (1, "once"), (2, "once"), (4, "once"), (2, "each"), (4, "each")
    for num, reduce in ways:
        model = rj.fully_shard(GPT(CONFIG, rngs=nnx.Rngs(0)), mesh, axis=AXIS, units=Block, stacked=Block)
        run = nnx.jit(rj.value_and_grad(loss_fn, num_microbatches=num, reduce=reduce))
        report = hlo_report(run.lower(model, np.zeros((4 * SEQUENCES, CONFIG.seq + 1), np.int32)).compile().compiled)
        counts = [report.collectives[kind].executed for kind in ("all-gather", "reduce-scatter")]
        print(f"| {num} | {reduce} | {counts[0]} | {counts[1]} | {(report.temp_nbytes or 0) / 2**20:.1f} MiB |")


if __name__ == "__main__":
    main()
