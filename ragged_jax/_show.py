"""What `ragged-jax show` says of a checkpoint."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint, CheckpointDirectory


def show_checkpoint(path: Path, *, as_json: bool, verify: bool) -> int:
    """Prints what a checkpoint holds, or the latest one of a directory of them.

    Args:
      path: a checkpoint, or a directory of checkpoints.
      as_json: figures as JSON, tensor by tensor.
      verify: whether to read every byte and compare the checksums.

    Returns:
      An exit status: 0, or 1 for a checkpoint whose bytes are damaged.

    Raises:
      ValueError: it is no checkpoint, or not a whole one.
    """
    directory = CheckpointDirectory(path)
    if not (path / "manifest.json").exists() and (steps := directory.steps()):
        checkpoint, others = directory.open(), steps
    else:
        checkpoint, others = Checkpoint(path), []
    with checkpoint:
        faults = checkpoint.verify() if verify else []
        if as_json:
            print(json.dumps({**_figures(checkpoint), **({"faults": faults} if verify else {})}))
        else:
            _print(checkpoint, others)
            if verify and not faults:
                print("every byte is as it was written")
            for fault in faults:
                print(fault)
    return 1 if faults else 0


def _figures(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "path": str(checkpoint.path),
        "step": manifest.step,
        "num_ranks": manifest.num_ranks,
        "num_files": len(manifest.files),
        "nbytes": sum(file.nbytes for file in manifest.files),
        "metadata": manifest.metadata,
        "layouts": {prefix: layout.fingerprint for prefix, layout in checkpoint.layouts.items()},
        "tensors": {
            name: {"dtype": tensor.dtype, "shape": tensor.shape, "nbytes": tensor.nbytes, **tensor.attributes}
            for name, tensor in manifest.tensors.items()
        },
    }


def _print(checkpoint: Checkpoint, steps: list[int]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Column, Table

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 118)
    manifest = checkpoint.manifest
    total = sum(file.nbytes for file in manifest.files)
    if steps:
        console.print(f"steps {', '.join(map(str, steps))}; the latest that is whole:", soft_wrap=True)
    console.print(
        f"{checkpoint.path}: step {manifest.step}, {len(checkpoint)} tensors, {decimal(total)} in "
        f"{len(manifest.files)} files of {manifest.num_ranks} rank{'s' * (manifest.num_ranks > 1)}",
        soft_wrap=True,
    )
    groups: dict[str, list] = defaultdict(list)
    for name, tensor in manifest.tensors.items():
        groups[_collection(name, checkpoint)].append(tensor)
    numbers = (Column(heading, justify="right", no_wrap=True) for heading in ("tensors", "bytes"))
    table = Table(Column("collection", no_wrap=True), *numbers, "dtypes", "saved from", box=SIMPLE_HEAD)
    for name, tensors in sorted(groups.items()):
        layout = checkpoint.layouts.get(name)
        table.add_row(
            name or "(root)",
            str(len(tensors)),
            decimal(sum(tensor.nbytes for tensor in tensors)),
            ", ".join(sorted({tensor.dtype for tensor in tensors})),
            f"{layout.num_shards} shards" if layout else "",
        )
    console.print(table)
    if manifest.metadata:
        console.print(f"metadata: {json.dumps(manifest.metadata)}", soft_wrap=True)


def _collection(name: str, checkpoint: Checkpoint) -> str:
    """What a tensor is listed under: the longest prefix that has a layout, or else its first step."""
    prefixes = [p for p in checkpoint.layouts if not p or name.startswith(f"{p}/")]
    return max(prefixes, key=len) if prefixes else name.split("/")[0]
