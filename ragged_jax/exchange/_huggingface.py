"""JAX models from and to Hugging Face directories."""

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from ..checkpoint import Checkpoint, CheckpointDirectory, TensorEntry, open_huggingface, write_huggingface
from ..fsdp import check_same_on_all_processes
from ..layout import NameMap
from ._checkpointer import Checkpointer, from_first, restore_from

T = TypeVar("T")
_MODEL = "model"
_HOURS = 24 * 3600.0  # that the other processes wait for the first one to write


def load_huggingface(path: str | Path, like: T, names: NameMap | None = None, *, cast: bool = False) -> T:
    """A model with the weights in a Hugging Face directory. Each device reads its own part of them.

    Args:
      path: the directory, or a single safetensors file.
      like: the model as it is wanted: a sharded model, or any pytree that `Checkpointer.restore` takes. Its values do
        not matter, and it is not changed. For a part of a Flax model give its state: `nnx.state(model, nnx.Param)`.
      names: from the model's names to those in the files; by default they are the same. What it ignores, such as
        random state, stays as it is in `like`.
      cast: whether weights of other dtypes are converted; otherwise they are an error.

    Raises:
      ValueError: the map ignores tensors that have no values in `like`.
      NameMapError: naming every tensor that is missing in the files, that the model has not, or of another shape.
      CheckpointError: files are missing, cut or no safetensors files.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> import ragged_jax as rj
      >>> names = rj.NameMap((("up/kernel", "up.weight", "in out -> out in"),))
      >>> params = {"up": {"kernel": jnp.arange(6.0).reshape(2, 3)}}
      >>> path = save_huggingface(tempfile.mkdtemp() + "/model", params, names)
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> like = rj.shard_tree({"up": {"kernel": jnp.zeros((2, 3))}}, mesh, axis="fsdp")
      >>> rj.full_params(load_huggingface(path, like, names))["up"]["kernel"]
      array([[0., 1., 2.],
             [3., 4., 5.]], dtype=float32)
    """

    def opened(wanted: Mapping[str, TensorEntry]) -> Checkpoint:
        targets = {name.removeprefix(f"{_MODEL}/"): tuple(tensor.shape) for name, tensor in wanted.items()}
        return open_huggingface(path, names, prefix=_MODEL, targets=targets)

    def stays(name: str) -> bool:
        return names is not None and names.is_ignored(name.removeprefix(f"{_MODEL}/"))

    return restore_from(opened, {_MODEL: like}, cast=cast, stays=stays)[_MODEL]


def save_huggingface(
    path: str | Path,
    model: Any,
    names: NameMap | None = None,
    *,
    dtype: str | None = None,
    config: Mapping[str, Any] | None = None,
    max_file_nbytes: int = 5_000_000_000,
) -> Path:
    """Writes a model as a Hugging Face directory: safetensors files, and an index where there are several.

    Every process first saves what it holds in a checkpoint beside the directory, from which the first process then
    writes it, so that no process holds a whole model. The disk has room for it twice for that long.

    Args:
      path: the directory. It must not exist, or be empty.
      model: a sharded model, or any pytree that `Checkpointer.save` takes.
      names: from the model's names to those in the files; by default they are the same.
      dtype: to convert floating-point tensors to, such as `bfloat16`; by default they stay as they are.
      config: what `config.json` says.
      max_file_nbytes: how much goes into one file, but for a tensor that is larger.

    Raises:
      FileExistsError: there is something already.
      NameMapError: naming every tensor that the map does not know, or that does not fit.
      OSError: the disk is full, or the like. Nothing is left behind.
    """
    path, token = Path(path), from_first(np.frombuffer(secrets.token_bytes(8), np.uint32))
    folder = path.parent / f".{path.name}.{token.tobytes().hex()}.checkpoint"
    try:
        with _together(f"saving the model for {path}"):  # before all know that it is saved, it must not be removed
            Checkpointer(folder, background=False).save(0, {_MODEL: model})
        with _together(f"writing {path}"):
            if jax.process_index() == 0:
                with CheckpointDirectory(folder).open(0) as checkpoint:
                    options = {"dtype": dtype, "config": config, "max_file_nbytes": max_file_nbytes}
                    write_huggingface(checkpoint, path, names, only=_MODEL, **options)
    finally:
        if jax.process_index() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return path


@contextmanager
def _together(what: str) -> Iterator[None]:
    """Ends when every process has come to the end of it. Where one failed, all fail."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        check_same_on_all_processes({"error": repr(failure)}, what=f"{what}: what failed", timeout_s=_HOURS)
    finally:
        if failure is not None:
            raise failure
