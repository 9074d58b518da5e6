"""Saves and loads a sharded state as this library does, as plain safetensors, and with Orbax, on the same disk.

    python benchmarks/checkpoint.py --mib 256 --rounds 10

Rounds are paired: in each of them every way saves and loads once, in turn, each time in another order. The state is
one f32 model on 8 virtual CPU devices whose tensors all divide, so that each way can shard it.

A save ends when the bytes are on the disk: all files are synced. `--no-sync` leaves that out for all ways, and a save
ends when the kernel has the bytes. Before a load the files are dropped from the page cache (`--warm`: they are read
into it), and freed memory goes back to the system, as if the process had just started (`--used-memory`: it does not).

`safetensors` gathers the shards into whole arrays, as a program must whose state has changed since the last save.
`gathered before` has the whole arrays at hand already; it loads as `safetensors` does.
"""

import argparse
import ctypes
import json
import os
import platform
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import ragged_jax as rj
from ragged_jax.checkpoint._bytes import crc32

Way = tuple[Callable[[Path], object], Callable[[Path], object]]
_fsync = os.fsync  # also when `--no-sync` puts nothing in its place
Seconds = dict[str, dict[str, list[float]]]


def make_state(mib: int) -> dict[str, np.ndarray]:
    """Layers of 4 matrices of 4 MiB each and 2 vectors."""
    rng = np.random.default_rng(0)
    state = {}
    for layer in range(mib // 16):
        for name, shape in {"q": (1024, 1024), "k": (1024, 1024), "up": (2048, 512), "down": (512, 2048)}.items():
            state[f"layers/{layer}/{name}"] = rng.normal(size=shape).astype(np.float32)
        state[f"layers/{layer}/scale"] = np.ones(512, np.float32)
        state[f"layers/{layer}/bias"] = np.zeros(512, np.float32)
    return state


def ragged(state: dict, mesh: jax.sharding.Mesh) -> Way:
    tree = rj.shard_tree({"layers": _nested(state)}, mesh, axis="fsdp", units="layers/*")

    def save(path: Path) -> None:
        with rj.Checkpointer(path, background=False) as checkpointer:
            checkpointer.save(1, tree)

    return save, lambda path: jax.block_until_ready(rj.Checkpointer(path).restore(tree))


def plain(state: dict, mesh: jax.sharding.Mesh, gathered: bool = False) -> Way:
    """One file of whole tensors."""
    arrays, sharding = _sharded(state, mesh)

    def save(path: Path) -> None:
        path.mkdir()
        save_file(state if gathered else {n: _whole(x) for n, x in arrays.items()}, path / "model.safetensors")
        _sync(path)

    def load(path: Path) -> object:
        whole = load_file(path / "model.safetensors")
        return jax.block_until_ready(jax.device_put(whole, sharding))

    return save, load


def _whole(x: jax.Array) -> np.ndarray:
    """`np.asarray`, which would remember its result and do nothing the second time."""
    return np.concatenate([shard.data for shard in x.addressable_shards])


def orbax(state: dict, mesh: jax.sharding.Mesh) -> Way:
    import orbax.checkpoint as ocp

    arrays, _ = _sharded(state, mesh)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
    checkpointer = ocp.Checkpointer(ocp.StandardCheckpointHandler())

    def save(path: Path) -> None:
        checkpointer.save(path, args=ocp.args.StandardSave(arrays))
        _sync(path)

    def load(path: Path) -> object:
        return jax.block_until_ready(checkpointer.restore(path, args=ocp.args.StandardRestore(abstract)))

    return save, load


def _nested(state: dict) -> dict:
    layers: dict[str, dict] = {}
    for name, x in state.items():
        _, layer, leaf = name.split("/")
        layers.setdefault(layer, {})[leaf] = x
    return layers


def _sharded(state: dict, mesh: jax.sharding.Mesh) -> tuple[dict, dict]:
    sharding = {name: NamedSharding(mesh, PartitionSpec("fsdp")) for name in state}
    return jax.block_until_ready(jax.device_put(state, sharding)), sharding


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def _sync(path: Path, fsync: Callable[[int], None] | None = None) -> None:
    for file in _files(path):
        with open(file, "rb") as opened:
            (fsync or os.fsync)(opened.fileno())


def _drop_from_cache(path: Path) -> None:
    for file in _files(path):
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _new_memory() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def measure(ways: dict[str, Way], rounds: int, folder: Path, *, warm: bool, used_memory: bool) -> Seconds:
    """Seconds by way and by `save` or `load`. The first round warms up and does not count."""
    seconds: Seconds = {name: {"save": [], "load": []} for name in ways}
    for at in range(rounds + 1):
        names = list(ways)
        names = names[at % len(names) :] + names[: at % len(names)]
        for name in names:
            path = folder / name
            for what, function in zip(("save", "load"), ways[name], strict=True):
                if what == "load":
                    _sync(path, _fsync)
                    _drop_from_cache(path)
                    for file in _files(path) if warm else ():
                        file.read_bytes()
                    if not used_memory:
                        _new_memory()
                start = time.perf_counter()
                result = function(path)
                if at:
                    seconds[name][what].append(time.perf_counter() - start)
                del result
            shutil.rmtree(path)
    return seconds


def quartiles(values: list[float], digits: int) -> str:
    """The median, and the quartiles in brackets."""
    low, middle, high = (f"{x:.{digits}f}" for x in np.quantile(values, (0.25, 0.5, 0.75)))
    return f"{middle} ({low} to {high})"


def checksums(function: Callable[[memoryview], int]) -> float:
    """GB/s of one core, chunk by chunk as the files have them. The best of five."""
    data, chunk = memoryview(np.random.default_rng(0).bytes(64 << 20)), 1 << 18
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for at in range(0, data.nbytes, chunk):
            function(data[at : at + chunk])
        seconds.append(time.perf_counter() - start)
    return data.nbytes / min(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="of the state")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-sync", action="store_true", help="no way waits for the disk")
    parser.add_argument("--warm", action="store_true", help="load from the page cache")
    parser.add_argument("--used-memory", action="store_true", help="load into memory that was freed before")
    parser.add_argument("--ways", nargs="*", help="only these")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default the temporary one")
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    state = make_state(args.mib)
    mib = sum(x.nbytes for x in state.values()) / 2**20
    makers = {
        "ragged": ragged,
        "safetensors": plain,
        "gathered before": partial(plain, gathered=True),
        "orbax": orbax,
    }
    ways = {name: make(state, mesh) for name, make in makers.items() if args.ways is None or name in args.ways}
    if args.no_sync:
        os.fsync = lambda descriptor: None
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        seconds = measure(ways, args.rounds, Path(folder), warm=args.warm, used_memory=args.used_memory)
    load = os.getloadavg()
    print(f"{mib:.0f} MiB, {args.rounds} rounds, {os.cpu_count()} cores, load {load[0]:.1f}")
    print(f"CRC32 {checksums(crc32):.1f} GB/s on one core, that of Python {checksums(zlib.crc32):.1f}")
    print("median (quartiles) of MiB/s, and of how many times as fast ragged is in the same round")
    for name, times in seconds.items():
        for what, values in times.items():
            ratios = [x / y for x, y in zip(values, seconds["ragged"][what], strict=True)]
            speeds = quartiles([mib / value for value in values], 0)
            print(f"{name:16} {what}  {speeds:24} {quartiles(ratios, 2)}")
    if args.json:
        packages = {name: version(name) for name in ("jax", "safetensors", "orbax-checkpoint")}
        about = {"mib": mib, "packages": packages, "python": platform.python_version(), "cores": os.cpu_count()}
        about |= {"synced": not args.no_sync, "warm": args.warm, "used_memory": args.used_memory, "load": load}
        args.json.write_text(json.dumps({**about, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
