"""The checkpoint format: tensors by name, without padding, on any number of ranks; no framework needed.

`ragged_jax.exchange` and `torch_bridge` put the states of JAX and PyTorch jobs into it. Names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._batch import Batch as Batch
    from ._checkpoint import Checkpoint as Checkpoint
    from ._checkpoint import numpy_dtype as numpy_dtype
    from ._checkpoint import read_tensor as read_tensor
    from ._directory import CheckpointDirectory as CheckpointDirectory
    from ._manifest import CheckpointError as CheckpointError
    from ._manifest import Manifest as Manifest
    from ._manifest import Region as Region
    from ._manifest import TensorEntry as TensorEntry
    from ._memory import empty as empty
    from ._safetensors import ALIGNMENT as ALIGNMENT
    from ._shards import clear_padding as clear_padding
    from ._shards import fill_shard as fill_shard
    from ._shards import join as join
    from ._shards import layer_name as layer_name
    from ._shards import read_shard as read_shard
    from ._shards import shard_parts as shard_parts
    from ._shards import slab_tensors as slab_tensors
    from ._threads import in_threads as in_threads
    from ._write import Part as Part

_HOME = {
    "_batch": ("Batch",),
    "_checkpoint": ("Checkpoint", "numpy_dtype", "read_tensor"),
    "_directory": ("CheckpointDirectory",),
    "_manifest": ("CheckpointError", "Manifest", "Region", "TensorEntry"),
    "_memory": ("empty",),
    "_safetensors": ("ALIGNMENT",),
    "_shards": ("clear_padding", "fill_shard", "join", "layer_name", "read_shard", "shard_parts", "slab_tensors"),
    "_threads": ("in_threads",),
    "_write": ("Part",),
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
