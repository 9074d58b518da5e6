"""Step time, state and temporary memory of 8-bit AdamW against fp32 `optax.adamw`.

All in one process, one step of each per round in alternating order, compared with fp32 round by round: only such
ratios mean something on a machine that does other things too. On one device; parameters and state are donated.

    python benchmarks/adam8bit.py --out benchmarks/results/adam8bit
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ragged_jax as rj


def as_step(tx):
    def step(params, grads, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def made_inside(step):
    """A step that makes its gradients itself, as a training step does: their memory is free to be used again."""

    def new(params, like, state):
        return step(params, jax.lax.optimization_barrier(jax.tree.map(lambda x: x * 1.0001, like)), state)

    return new


METHODS = {
    "optax.adamw, float32": lambda: as_step(optax.adamw(1e-3)),
    "adamw8bit": lambda: as_step(rj.optim.adamw8bit(1e-3)),
    "fused_adamw8bit": lambda: rj.optim.fused_adamw8bit(1e-3),
    "fused_adamw8bit, tile(32, 32)": lambda: rj.optim.fused_adamw8bit(1e-3, block=rj.tile(32, 32)),
    "adamw8bit, not chunked": lambda: as_step(rj.optim.adamw8bit(1e-3, chunk=None)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=2**23, help="of each of two matrices' common size, in all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of all cores; steadier on a busy machine")
    parser.add_argument("--inside", action="store_true", help="gradients are made by the step, not passed to it")
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    side = 1024
    shapes = {"up": (side, args.numel // 2 // side), "down": (args.numel // 2 // side, side)}
    rng = np.random.default_rng(0)
    grads = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    runs = {}
    for name, make in METHODS.items():
        init, step = make()
        step = made_inside(step) if args.inside else step
        params = jax.tree.map(jnp.copy, grads)
        state = init(params)
        nbytes = sum(x.nbytes for x in jax.tree.leaves(state)) / args.numel
        compiled = jax.jit(step, donate_argnums=(0, 2)).lower(params, grads, state).compile()
        memory: Any = compiled.memory_analysis()
        temp = (memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes) / args.numel
        runs[name] = {"step": compiled, "at": (params, state), "state": nbytes, "temp": temp, "times": []}
    for number in range(args.rounds + 2):
        for run in list(runs.values())[:: 1 if number % 2 else -1]:
            params, state = run["at"]
            start = clock()
            run["at"] = jax.block_until_ready(run["step"](params, grads, state))
            run["times"].append(clock() - start)
    first = np.array(next(iter(runs.values()))["times"][2:])
    lines = ["| | ms per million parameters | times fp32: median (quartiles) | state B/param | temporary B/param |"]
    lines += ["|---|---:|---|---:|---:|"]
    rows = []
    for name, run in runs.items():
        times = np.array(run["times"][2:])
        low, mid, high = np.percentile(times / first, (25, 50, 75))
        per_million = 1e3 * np.median(times) / (args.numel / 1e6)
        rows.append(
            {"method": name, "ms": per_million, "ratio": [low, mid, high], "state": run["state"], "temp": run["temp"]}
        )
        ratio = f"{mid:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"| {name} | {per_million:.2f} | {ratio} | {run['state']:.3f} | {run['temp']:.2f} |")
    command = "python benchmarks/adam8bit.py " + " ".join(sys.argv[1:])
    about = f"jax {jax.__version__}, optax {optax.__version__}, {os.cpu_count()} CPU cores, {platform.machine()}"
    text = (
        f"# 8-bit AdamW on CPU\n\n`{command}`\n\n{about}; {args.numel:,} parameters, float32\n\n"
        + "\n".join(lines)
        + "\n"
    )
    print(text)
    if args.out:
        args.out.with_suffix(".md").write_text(text)
        args.out.with_suffix(".json").write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
