"""How many bytes a step of 8-bit AdamW moves on an accelerator: what every kernel of the program reads and writes.

Compiled ahead of time; no GPU or TPU is needed, only its compiler (see `untile.py`). The floor for float32 parameters
that lie on the device once: read parameter, gradient and codes, write parameter and codes, 16 bytes.

    python benchmarks/adam8bit_passes.py --out benchmarks/results/adam8bit_passes
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from untile import devices_of

import ragged_jax as rj

SHAPE = (4096, 4096)
ITEMSIZE = {"f32": 4, "s32": 4, "u32": 4, "u8": 1, "pred": 1, "bf16": 2, "s16": 2, "u16": 2}
ARRAY = re.compile(r"\b(f32|s32|u32|u8|pred|bf16|s16|u16)\[([\d,]*)\]")


def as_step(tx):
    def step(params, grads, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


METHODS = {
    "optax.adamw, float32": lambda: as_step(optax.adamw(1e-3)),
    "adamw8bit": lambda: as_step(rj.optim.adamw8bit(1e-3, chunk=None)),
    "fused_adamw8bit": lambda: rj.optim.fused_adamw8bit(1e-3, chunk=None),
    'fused_adamw8bit, kernel="pallas"': lambda: rj.optim.fused_adamw8bit(1e-3, kernel="pallas"),
    "fused_adamw8bit, tile(32, 32)": lambda: rj.optim.fused_adamw8bit(1e-3, block=rj.tile(32, 32), chunk=None),
}


def nbytes(text: str) -> int:
    return sum(ITEMSIZE[t] * int(np.prod([int(d) for d in dims.split(",") if d])) for t, dims in ARRAY.findall(text))


def kernels(text: str) -> list[tuple[str, float]]:
    """Name and bytes a parameter of the entry's kernels that move a byte a parameter or more."""
    entry = text[text.index("\nENTRY") :].splitlines()
    results = {}
    found = []
    for line in entry:
        if not (match := re.match(r"\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(([^)]*)\)", line)):
            continue
        name, result, op, operands = match.groups()
        results[name] = nbytes(result)
        if op in ("fusion", "copy", "reduce", "reshape", "transpose", "custom-call") and "ConcatBitcast" not in line:
            moved = results[name] + sum(results.get(o, 0) for o in re.findall(r"%([\w.-]+)", operands))
            if moved >= np.prod(SHAPE):
                found.append((name, moved / np.prod(SHAPE)))
    return found


def rows(mesh: Mesh) -> list[str]:
    """The rest of a table's row, for each method."""
    sharding, found = NamedSharding(mesh, PartitionSpec()), []
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    params = place(jax.ShapeDtypeStruct(SHAPE, "float32"))
    for name, make in METHODS.items():
        init, step = make()
        state = jax.tree.map(place, jax.eval_shape(init, params))
        with jax.set_mesh(mesh):  # Mosaic asks it for the kind of TPU
            compiled = jax.jit(step, donate_argnums=(0, 2)).lower(params, params, state).compile()
        each = [moved for _, moved in kernels(compiled.as_text() or "")]
        memory: Any = compiled.memory_analysis()
        temp = memory.temp_size_in_bytes / np.prod(SHAPE)
        found.append(f"| {name} | {sum(each):.1f} | {temp:.1f} | {', '.join(f'{moved:.1f}' for moved in each)} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["h100", "v5p", "v6e"])
    parser.add_argument("--out", type=Path, help="writes OUT.md")
    args = parser.parse_args()
    lines = ["| | | bytes a parameter | temporary | by kernel |", "|---|---|---:|---:|---|"]
    for target in args.targets:
        mesh = Mesh(np.array(devices_of(target)[:1]), ("d",))
        lines += [f"| {target} {row}" for row in rows(mesh)]
    about = f"`python benchmarks/adam8bit_passes.py`\n\njax {jax.__version__}; one {list(SHAPE)} matrix, float32"
    text = f"# What a step moves\n\n{about}\n\n" + "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
