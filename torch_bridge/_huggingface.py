"""Torch modules from Hugging Face directories."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import nn

from ragged_jax.checkpoint import HuggingFaceFolder, Renamed
from ragged_jax.layout import NameMap

from ._checkpointer import restored
from ._items import State

M = TypeVar("M", bound=nn.Module)


def load_huggingface(path: str | Path, module: M, names: NameMap | None = None, *, cast: bool = False) -> M:
    """Fills a fully sharded module with the weights in a Hugging Face directory. Each rank reads its own part.

    Args:
      path: the directory, or a single safetensors file.
      module: on its devices; from `meta`, it is never whole.
      names: from the layout's names to those in the files; what it does not speak of is called there as in
        `module.state_dict()`. Give it what was given to `fully_shard`, if the files have the module's own names. Of
        tensors whose dims are in another order in the files, a rank may read more than its part. What it ignores
        stays as it is in the module; from `meta`, `init_parameters` then gives it values.
      cast: whether weights of other dtypes are converted; otherwise they are an error.

    Returns:
      The module. Buffers that are not persistent stay as they are, even if the files have them.

    Raises:
      NameMapError: naming every tensor that is missing in the files, that the module has not, or of another shape.
      CheckpointError: files are missing, cut or no safetensors files.

    Example:
      >>> import tempfile
      >>> import torch
      >>> import torch.distributed as dist
      >>> import torch_bridge as tb
      >>> from safetensors.torch import save_file
      >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
      >>> path = tempfile.mkdtemp() + "/model.safetensors"
      >>> save_file({"0.weight": torch.arange(6.0).view(2, 3)}, path)
      >>> with torch.device("meta"):
      ...     model = tb.fully_shard(nn.Sequential(nn.Linear(3, 2, bias=False)))
      >>> tb.load_huggingface(path, model)(torch.ones(3)).tolist()
      [3.0, 12.0]
      >>> dist.destroy_process_group()
    """
    with HuggingFaceFolder(path) as folder:
        found = State(module, {}, folder)
        wanted = {item.name: item.placement.tensor.shape for item in found.items}
        called = _with_own_names(names or NameMap(()), module, list(wanted))
        found.items = [item for item in found.items if not called.is_ignored(item.name)]
        return restored(Renamed(folder, called.inverse, targets=wanted), found, cast=cast)


def _with_own_names(names: NameMap, module: nn.Module, paths: list[str]) -> NameMap:
    """Adds to a map the paths that it does not know, and what the module itself says of tied tensors and buffers."""
    first: dict[nn.Parameter, str] = {}
    tied = {n: first.setdefault(x, n) for n, x in module.named_parameters(remove_duplicate=False)}
    saved = module.state_dict(keep_vars=True)
    unsaved = (name for name, _ in module.named_buffers(remove_duplicate=False) if name not in saved)
    return replace(
        names,
        rules=(*names.rules, *((path, path.replace("/", ".")) for path in paths if not names.knows(path))),
        aliases={alias: name for alias, name in tied.items() if alias != name} | names.aliases,
        ignored=(*names.ignored, *unsaved),
    )
