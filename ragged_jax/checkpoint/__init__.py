"""The checkpoint format: tensors by name, without padding, on any number of ranks; no framework needed.

`ragged_jax.exchange` and `torch_bridge` put the states of JAX and PyTorch jobs into it. Names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._base import BaseCheckpointer as BaseCheckpointer
    from ._base import as_json as as_json
    from ._base import check_wanted as check_wanted
    from ._checkpoint import Checkpoint as Checkpoint
    from ._checkpoint import find_sources as find_sources
    from ._checkpoint import numpy_dtype as numpy_dtype
    from ._checkpoint import read_tensor as read_tensor
    from ._copy import copy_checkpoint as copy_checkpoint
    from ._directory import CheckpointDirectory as CheckpointDirectory
    from ._huggingface import HuggingFaceFolder as HuggingFaceFolder
    from ._huggingface import open_huggingface as open_huggingface
    from ._huggingface import write_huggingface as write_huggingface
    from ._manifest import CheckpointError as CheckpointError
    from ._manifest import Manifest as Manifest
    from ._manifest import Region as Region
    from ._manifest import TensorEntry as TensorEntry
    from ._runs import Run as Run
    from ._runs import runs_of as runs_of
    from ._safetensors import ALIGNMENT as ALIGNMENT
    from ._shards import fill_shard as fill_shard
    from ._shards import join as join
    from ._shards import layer_name as layer_name
    from ._shards import read_shard as read_shard
    from ._shards import shard_parts as shard_parts
    from ._shards import slab_tensors as slab_tensors
    from ._views import Renamed as Renamed
    from ._write import Part as Part
    from ._write import in_threads as in_threads

_HOME = {
    "_base": ("BaseCheckpointer", "as_json", "check_wanted"),
    "_checkpoint": ("Checkpoint", "find_sources", "numpy_dtype", "read_tensor"),
    "_copy": ("copy_checkpoint",),
    "_directory": ("CheckpointDirectory",),
    "_huggingface": ("HuggingFaceFolder", "open_huggingface", "write_huggingface"),
    "_manifest": ("CheckpointError", "Manifest", "Region", "TensorEntry"),
    "_runs": ("Run", "runs_of"),
    "_safetensors": ("ALIGNMENT",),
    "_shards": ("fill_shard", "join", "layer_name", "read_shard", "shard_parts", "slab_tensors"),
    "_views": ("Renamed",),
    "_write": ("Part", "in_threads"),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
