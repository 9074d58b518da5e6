"""What it takes to create a model that no device could hold: peak memory of the host process, by way of creating it.

    python benchmarks/init_memory.py                      # three processes, one after another; a table

The devices are virtual, so their memory is the process's. A model of 0.5 GB is created on 8 devices (and on 7, where
nothing divides) as shards from the start (`fully_shard` of a function), eagerly and then sharded, and replicated.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

WAYS = {
    "deferred": "born as shards: `rj.fully_shard(lambda: Model(...), ...)`",
    "eager": "created whole, then sharded: `rj.fully_shard(Model(...), ...)`",
    "replicated": "created whole, then put on every device",
}


def measure(way: str, num_devices: int, layers: int, width: int) -> dict[str, float]:
    """In a process of its own: bytes of the model, of one device's arrays, and of the peak above jax itself."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    import ragged_jax as rj

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(16001, width, rngs=rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(layers)])

    mesh = jax.make_mesh((num_devices,), ("fsdp",))
    make = lambda: Model(nnx.Rngs(0))
    jax.block_until_ready(jax.random.normal(jax.random.key(0), (8,)))
    at_rest, start = peak_nbytes(), time.perf_counter()
    if way == "replicated":
        state = jax.device_put(nnx.state(make(), nnx.Param), NamedSharding(mesh, PartitionSpec()))
    else:
        model = rj.fully_shard(make if way == "deferred" else make(), mesh, axis="fsdp", units=Layer)
        state = nnx.state(model, nnx.Param)
    leaves = jax.block_until_ready(jax.tree.leaves(state))
    return {
        "model": sum(x.size * 4 for x in jax.tree.leaves(nnx.state(nnx.eval_shape(make), nnx.Param))),
        "device": sum(x.addressable_shards[0].data.nbytes for x in leaves),
        "peak": peak_nbytes() - at_rest,
        "seconds": time.perf_counter() - start,
    }


def peak_nbytes() -> int:
    """The largest resident memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux what getrusage says includes the parent's peak, as it was when this was started
        return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if "VmHWM" in line)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_apart(way: str, num_devices: int, layers: int, width: int) -> dict[str, float]:
    """`measure` in a new process."""
    command = [sys.executable, __file__, "--measure", way, str(num_devices), str(layers), str(width)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def table(device_counts: tuple[int, ...], layers: int, width: int) -> str:
    import jax

    lines = [
        "# What it takes to create a model",
        "",
        f"`python benchmarks/init_memory.py --layers {layers} --width {width}`, jax {jax.__version__}, virtual "
        f"CPU devices, {os.cpu_count()} cores. An embedding of 16001 x {width} and {layers} MLPs of {width} x "
        f"{4 * width} in f32, each matrix from a variance-scaled distribution. Peak: the largest resident "
        "memory of the process, less what it had before; it holds the arrays of all devices. Seconds include "
        "compiling. Beyond the model's own bytes a deferred init takes room for one tensor or slab at a time: random "
        "bits are made from two counters for each element, and a slab is built beside its tensors.",
        "",
        "| devices | created | model | arrays on each device | peak of the process | peak / model | seconds |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for num_devices in device_counts:
        for way, text in WAYS.items():
            got = measure_apart(way, num_devices, layers, width)
            mib = {key: f"{got[key] / 2**20:,.0f} MiB" for key in ("model", "device", "peak")}
            lines.append(
                f"| {num_devices} | {text} | {mib['model']} | {mib['device']} | {mib['peak']} | "
                f"{got['peak'] / got['model']:.2f} | {got['seconds']:.1f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 7])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="a file for the table")
    parser.add_argument("--measure", nargs=4, metavar=("WAY", "DEVICES", "LAYERS", "WIDTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        way, *sizes = args.measure
        print(json.dumps(measure(way, *map(int, sizes))))
        return
    text = table(tuple(args.devices), args.layers, args.width)
    if args.out:
        args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
