"""Saves and loads a sharded state as this library does, as plain safetensors, and with Orbax, on the same disk.

    python benchmarks/checkpoint.py --mib 256 --rounds 5

Rounds are paired: in each of them every way saves and loads once, in turn, each time in another order. A save ends
when the bytes are on the disk (all files are synced), and before a load the files are dropped from the page cache.
The state is one f32 model on 8 virtual CPU devices whose tensors all divide, so that each way can shard it.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import ragged_jax as rj

Way = tuple[Callable[[Path], object], Callable[[Path], object]]


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


def plain(state: dict, mesh: jax.sharding.Mesh) -> Way:
    """One file of whole tensors."""
    arrays, sharding = _sharded(state, mesh)

    def save(path: Path) -> None:
        path.mkdir()
        save_file({name: np.asarray(x) for name, x in arrays.items()}, path / "model.safetensors")
        _sync(path)

    def load(path: Path) -> object:
        whole = load_file(path / "model.safetensors")
        return jax.block_until_ready(jax.device_put(whole, sharding))

    return save, load


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


def _sync(path: Path) -> None:
    for file in _files(path):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())


def _drop_from_cache(path: Path) -> None:
    for file in _files(path):
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(ways: dict[str, Way], rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds by way and by `save` or `load`. The first round warms up and does not count."""
    seconds: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for name in ways}
    for at in range(rounds + 1):
        names = list(ways)
        names = names[at % len(names) :] + names[: at % len(names)]
        for name in names:
            path = folder / name
            for what, function in zip(("save", "load"), ways[name], strict=True):
                if what == "load":
                    _drop_from_cache(path)
                start = time.perf_counter()
                function(path)
                if at:
                    seconds[name][what].append(time.perf_counter() - start)
            shutil.rmtree(path)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default the temporary one")
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    state = make_state(args.mib)
    mib = sum(x.nbytes for x in state.values()) / 2**20
    ways = {"ragged": ragged(state, mesh), "safetensors": plain(state, mesh)}
    try:
        ways["orbax"] = orbax(state, mesh)
    except ImportError:
        print("orbax-checkpoint is not installed and left out")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        seconds = measure(ways, args.rounds, Path(folder))
    print(f"{mib:.0f} MiB, {args.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, times in seconds.items():
        for what, values in times.items():
            ratio = statistics.median(x / y for x, y in zip(values, seconds["ragged"][what], strict=True))
            print(f"{name:12} {what}: {mib / statistics.median(values):8.0f} MiB/s; ragged is {ratio:.2f} x as fast")
    if args.json:
        packages = {}
        for package in ("jax", "safetensors", "orbax-checkpoint"):
            try:
                packages[package] = version(package)
            except PackageNotFoundError:
                packages[package] = None
        about = {"mib": mib, "packages": packages, "python": platform.python_version(), "cores": os.cpu_count()}
        args.json.write_text(json.dumps({**about, "load": os.getloadavg(), "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
