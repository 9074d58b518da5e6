"""How the shape of the quantisation blocks changes the final loss of a byte-level GPT, and the error of its moments.

Trains the model of `examples/gpt.py`, small, on the source files of Python's standard library with fp32 AdamW and
with 8-bit AdamW in blocks of several shapes, from several seeds each. One device. Everything but the optimizer is the
same within a seed: first weights, order of the text, schedule.

    python benchmarks/optimizer_study.py --out benchmarks/results/optimizer_study
"""

import argparse
import json
import math
import os
import sys
import time
from itertools import product
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import jax
import numpy as np
import optax
import text
from flax import nnx
from gpt import GPT, GPTConfig

import ragged_jax as rj
from ragged_jax.optim._reference import block_ids, dequantise, quantise

BLOCKS = {
    "elements(256)": rj.elements(256),
    "elements(2048)": rj.elements(2048),
    "tile(32, 32)": rj.tile(32, 32),
    "tile(128, 128)": rj.tile(128, 128),
    "rows(1)": rj.rows(1),
}


def optimizers(schedule) -> dict[str, optax.GradientTransformation]:
    made: dict[str, optax.GradientTransformation] = {"fp32": optax.adamw(schedule, b2=0.95)}
    made |= {name: rj.optim.adamw8bit(schedule, b2=0.95, block=block) for name, block in BLOCKS.items()}
    made["elements(256), no clamp"] = rj.optim.adamw8bit(schedule, b2=0.95, clamp_second_moment=False)
    return made


def loss_fn(model: GPT, batch: jax.Array) -> jax.Array:
    """Bits per byte."""
    logits = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean() / math.log(2)


def train(name: str, seed: int, corpus: text.Text, judged: np.ndarray, args: argparse.Namespace):
    """The losses of the steps, the held-out loss in the end, and the optimizer."""
    model = GPT(GPTConfig(depth=args.depth, width=args.width), rngs=nnx.Rngs(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, args.steps // 10, args.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optimizers(schedule)[name])
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    batches = text.batches(corpus.train, args.batch, args.length, seed)
    losses = [step(model, optimizer, next(batches)) for _ in range(args.steps)]
    judge = nnx.jit(loss_fn)
    held_out = float(np.mean([judge(model, part) for part in jax.numpy.split(judged, 8)]))
    return [float(x) for x in losses], held_out, optimizer


def errors(optimizer: nnx.Optimizer) -> dict[str, list[float]]:
    """Of the moments that fp32 training ended with: the root mean square error of storing them, by block shape.

    Relative to the root mean square of the moment itself; the mean over all matrices, for the first and the second.
    """
    adam = next(s for s in jax.tree.leaves(nnx.as_pure(optimizer.opt_state), is_leaf=_is_adam) if _is_adam(s))
    found = {}
    for name, block in BLOCKS.items():
        means = []
        for moment, signed in ((adam.mu, True), (adam.nu, False)):
            each = []
            for x in map(np.asarray, jax.tree.leaves(moment)):
                if x.ndim == 2 and x.any():
                    ids = block_ids(x.shape, block)
                    codes = quantise(x, ids, "dynamic", signed=signed, at_least=int(not signed))
                    back = dequantise(*codes, ids, "dynamic", signed=signed)
                    each.append(float(np.sqrt(np.mean((back - x) ** 2) / np.mean(x**2))))
            means.append(float(np.mean(each)))
        found[name] = means
    return found


def _is_adam(x) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def table(rows: list[dict]) -> str:
    """Markdown: the held-out losses, and against fp32 seed by seed."""
    fp32 = {row["seed"]: row["held_out"] for row in rows if row["optimizer"] == "fp32"}
    error = {name: np.mean([row["errors"][name] for row in rows if row["errors"]], 0) for name in BLOCKS}
    lines = ["| blocks | held-out bits/byte, by seed | mean | against fp32, by seed | error of m | of v |"]
    lines += ["|---|---|---:|---|---:|---:|"]
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        mine = [row for row in rows if row["optimizer"] == name]
        losses = [row["held_out"] for row in mine]
        against = [100 * (row["held_out"] / fp32[row["seed"]] - 1) for row in mine]
        m, v = (f"{100 * e:.2f} %" for e in error[name]) if name in error else ("", "")
        by_seed, change = ", ".join(f"{x:.4f}" for x in losses), ", ".join(f"{x:+.2f} %" for x in against)
        lines.append(f"| {name} | {by_seed} | {np.mean(losses):.4f} | {change} | {m} | {v} |")
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """Loss against step, mean over seeds, smoothed over 20 steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        mean = np.mean([row["losses"] for row in rows if row["optimizer"] == name], 0)
        smooth = np.convolve(mean, np.ones(20) / 20, "valid")
        axes.plot(np.arange(len(smooth)) + 20, smooth, label=name, lw=1)
    axes.set(xlabel="step", ylabel="training loss, bits per byte", yscale="log")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"seeds": 3, "steps": 500, "depth": 2, "width": 128, "batch": 8, "length": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, help="writes OUT.md, OUT.json and OUT.png")
    args = parser.parse_args()
    corpus = text.load(None)
    judged = text.windows(corpus.held_out, 512, args.length)
    rows = already(args)
    done = {(row["optimizer"], row["seed"]) for row in rows}
    for seed, name in product(range(args.seeds), optimizers(0.0)):
        if (name, seed) in done:
            continue
        start = time.perf_counter()
        losses, held_out, optimizer = train(name, seed, corpus, judged, args)
        found = errors(optimizer) if name == "fp32" else {}
        rows.append({"optimizer": name, "seed": seed, "held_out": held_out, "losses": losses, "errors": found})
        seconds = time.perf_counter() - start
        print(f"{name}, seed {seed}: {held_out:.4f}, {seconds:.0f} s", file=sys.stderr, flush=True)
        if args.out:
            write(rows, args)
    print(table(rows))


def setting(args: argparse.Namespace) -> dict:
    """What must be the same for runs to be compared."""
    return {"jax": jax.__version__, **{k: v for k, v in vars(args).items() if k not in ("out", "seeds")}}


def already(args: argparse.Namespace) -> list[dict]:
    """The runs of an earlier call in the same setting, so that one that was stopped goes on."""
    path = args.out and args.out.with_suffix(".json")
    held = json.loads(path.read_text()) if path and path.exists() else {}
    return held["rows"] if held.get("setting") == setting(args) else []


def write(rows: list[dict], args: argparse.Namespace) -> None:
    command = " ".join(["python benchmarks/optimizer_study.py", *sys.argv[1:]])
    model = f"depth {args.depth}, width {args.width}, {args.steps} steps of {args.batch * args.length} bytes"
    about = f"jax {jax.__version__}, CPU; {model}, b2 = 0.95"
    document = f"# Block shapes of 8-bit AdamW\n\n`{command}`\n\n{about}\n\n{table(rows)}\n"
    args.out.with_suffix(".md").write_text(document)
    held = {"command": command, "setting": setting(args), "rows": rows}
    args.out.with_suffix(".json").write_text(json.dumps(held) + "\n")
    draw(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
