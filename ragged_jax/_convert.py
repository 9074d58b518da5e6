"""What `ragged-jax convert` does: checkpoints to Hugging Face directories and back."""

import json
from collections.abc import Callable
from pathlib import Path

from .checkpoint import Checkpoint, CheckpointDirectory, Renamed, copy_checkpoint, open_huggingface, write_huggingface
from .checkpoint._copy import converted
from .layout import NAME_MAPS, NameMap, itemsize

_MODEL = "model"
Write = Callable[[Callable[[int], object]], Path]


def convert(
    source: Path,
    target: Path,
    *,
    names: str | None = None,
    prefix: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
    max_file_nbytes: int = 5_000_000_000,
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """Converts a checkpoint into a Hugging Face directory, or such a directory into a checkpoint.

    Args:
      source: a checkpoint, a directory of them, a Hugging Face directory, or a safetensors file.
      target: the Hugging Face directory to make; or the directory of checkpoints to add to.
      names: a name map, from our names to Hugging Face's: one of `NAME_MAPS`, or a file.
      prefix: what the names of the model's tensors begin with in the checkpoint; by default `model`, if it can be.
      step: which checkpoint of a directory, by default the latest; or of the new one, by default 0.
      dtype: to convert floating-point tensors to.
      max_file_nbytes: how much goes into one safetensors file.
      dry_run: say what would be written, and write nothing.
      as_json: figures as JSON.

    Returns:
      An exit status, 0.

    Raises:
      ValueError: the source is neither, or the map does not fit it; everything that is wrong is named.
      OSError: the disk is full, or the like.
    """
    if dtype is not None and "float" not in dtype:
        raise ValueError(f"--dtype {dtype}: only floating-point tensors are converted, to float32, bfloat16, ...")
    known = None if names is None else read_names(names)
    directory = CheckpointDirectory(source)
    is_checkpoint = (source / "manifest.json").exists()
    write: Write
    if is_checkpoint or (source.is_dir() and directory.steps()):
        base = Checkpoint(source) if is_checkpoint else directory.open(step)
        below = prefix if prefix is not None else _MODEL if any(n.startswith(f"{_MODEL}/") for n in base) else ""
        result, what = Renamed(base, known, only=below), "Hugging Face directory"
        options = {"only": below, "dtype": dtype, "max_file_nbytes": max_file_nbytes}
        write = lambda fetched: write_huggingface(base, target, known, fetched=fetched, **options)
    else:
        base = result = open_huggingface(source, known, prefix=_MODEL if prefix is None else prefix)
        what, to = "checkpoint", CheckpointDirectory(target)
        write = lambda fetched: copy_checkpoint(result, to, step or 0, dtype=dtype, fetched=fetched)
    with base:
        _report(result, write, f"{what} {target}", dtype, dry_run, as_json)
    return 0


def read_names(name: str) -> NameMap:
    """A name map that is known, or from a file.

    Example:
      >>> len(read_names("bert").rules) > 10
      True
    """
    if name in NAME_MAPS:
        return NAME_MAPS[name]
    try:
        return NameMap.from_json(Path(name).read_bytes())
    except OSError as error:
        known = ", ".join(NAME_MAPS)
        raise ValueError(f"--map {name}: neither one of {known}, nor a file: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"--map {name}: {error}") from None


def _report(result: Checkpoint, write: Write, what: str, dtype: str | None, dry_run: bool, as_json: bool) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    dtypes = {name: converted(entry.dtype, dtype) for name, entry in result.tensors.items()}
    sizes = {name: entry.numel * itemsize(dtypes[name]) for name, entry in result.tensors.items()}
    console, total = Console(highlight=False, markup=False, quiet=as_json), sum(sizes.values())
    rows = [(name, f"{dtypes[name]}{list(entry.shape)}") for name, entry in result.tensors.items()]
    wide, wider = (max(map(len, column)) for column in zip(*rows, strict=True)) if rows else (0, 0)
    for name, kind in rows if dry_run else ():
        line = f"{name:{wide}}  {kind:{wider}}  {decimal(sizes[name]):>11}"
        console.print(line, soft_wrap=True)
    if not dry_run:
        columns = BarColumn(), DownloadColumn(), TransferSpeedColumn()
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            write(lambda nbytes: bar.advance(task, nbytes))
    done = "would be written to" if dry_run else "written to"
    console.print(f"{len(sizes)} tensors, {decimal(total)}, {done} {what}", soft_wrap=True)
    if as_json:
        tensors = {
            name: {"dtype": dtypes[name], "shape": entry.shape, "nbytes": sizes[name]}
            for name, entry in result.tensors.items()
        }
        print(json.dumps({"written": not dry_run, "nbytes": total, "tensors": tensors}))
