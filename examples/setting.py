"""What surrounds the training: the devices, each process's share of the batch, and the progress on the screen."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

VIRTUAL_DEVICES = 8  # unless told otherwise, on a CPU


def make_mesh(
    devices: int | None, coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Mesh:
    """A mesh of one axis, "fsdp", over the devices of all processes. Call it before anything else of jax.

    Args:
      devices: how many; None for 8 virtual ones on a CPU, and otherwise for all there are.
      coordinator: host:port of process 0; "auto" where jax finds the others itself; None for a single process.
      num_processes: how many take part; where jax finds them it need be given only for virtual devices.
      process_id: which of them this is.
    """
    if coordinator is not None:
        jax.distributed.initialize(None if coordinator == "auto" else coordinator, num_processes, process_id)
    each, rest = divmod(devices or VIRTUAL_DEVICES, num_processes or 1)
    if rest:
        raise SystemExit(f"{devices or VIRTUAL_DEVICES} devices do not divide over {num_processes} processes")
    jax.config.update("jax_num_cpu_devices", each)  # without effect on other platforms
    if jax.process_count() > 1 and devices not in (None, jax.device_count()):
        raise SystemExit(f"several processes use all their devices, {jax.device_count()} in all, not {devices}")
    return jax.make_mesh((devices or jax.device_count(),), ("fsdp",))


def launch(num_processes: int) -> int:
    """Runs this program once for each process, on this machine, and ends all of them when one fails.

    Returns:
      The exit code of the first to fail, or 0.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        shared = ["--coordinator", f"localhost:{probe.getsockname()[1]}", "--num-processes", str(num_processes)]
    command = [sys.executable, *sys.argv, *shared, "--process-id"]
    running = [subprocess.Popen([*command, str(i)]) for i in range(num_processes)]
    try:
        while True:
            codes = [process.poll() for process in running]
            if failed := [code for code in codes if code]:
                return failed[0]
            if None not in codes:
                return 0
            time.sleep(0.2)
    finally:
        for process in running:
            process.kill()


def on_mesh(batches: Iterator[np.ndarray], mesh: Mesh) -> Iterator[jax.Array]:
    """Each batch, split over the devices. Every process makes the same batches and gives its own share of them."""
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    for batch in batches:
        share = np.split(batch, jax.process_count())[jax.process_index()]
        yield jax.make_array_from_process_local_data(sharding, share, batch.shape)


def settle(optimizer: nnx.Optimizer, mesh: Mesh) -> None:
    """Puts the optimizer's counters on all devices, where each step leaves them; else step 2 would compile anew."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = nnx.state(optimizer)
    nnx.update(optimizer, jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, everywhere), state))


def nbytes_per_device(tree: Any) -> int:
    """What the arrays of a pytree really take on one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def progress_bar(console: Console) -> Progress:
    """A bar whose tasks have the fields `loss`, `speed` (bytes of text per second) and `memory` (bytes)."""
    return Progress(
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn(
            "loss {task.fields[loss]:.3f} bits/byte, {task.fields[speed]:,.0f} tokens/s, {task.fields[memory]}"
        ),
        TimeElapsedColumn(),
        console=console,
    )


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
