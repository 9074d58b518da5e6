"""The checkpoint format: tensors by name, without padding, on any number of ranks; no framework needed.

`ragged_jax.exchange` and `torch_bridge` put the states of JAX and PyTorch jobs into it. Names load on first use.
"""

from typing import TYPE_CHECKING

from .._on_use import on_use

if TYPE_CHECKING:
    from ._base import BaseCheckpointer as BaseCheckpointer
    from ._base import check_wanted as check_wanted
    from ._batch import Batch as Batch
    from ._bytes import numpy_dtype as numpy_dtype
    from ._checkpoint import Checkpoint as Checkpoint
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
    from ._memory import empty as empty
    from ._runs import Run as Run
    from ._runs import runs_of as runs_of
    from ._safetensors import ALIGNMENT as ALIGNMENT
    from ._shards import fill_shard as fill_shard
    from ._shards import join as join
    from ._shards import layer_name as layer_name
    from ._shards import read_shard as read_shard
    from ._shards import shard_parts as shard_parts
    from ._shards import slab_tensors as slab_tensors
    from ._sources import find_sources as find_sources
    from ._threads import in_threads as in_threads
    from ._views import Renamed as Renamed
    from ._write import Part as Part

_HOME = {
    "_batch": ("Batch",),
    "_base": ("BaseCheckpointer", "check_wanted"),
    "_bytes": ("numpy_dtype",),
    "_checkpoint": ("Checkpoint", "read_tensor"),
    "_copy": ("copy_checkpoint",),
    "_directory": ("CheckpointDirectory",),
    "_huggingface": ("HuggingFaceFolder", "open_huggingface", "write_huggingface"),
    "_manifest": ("CheckpointError", "Manifest", "Region", "TensorEntry"),
    "_memory": ("empty",),
    "_runs": ("Run", "runs_of"),
    "_safetensors": ("ALIGNMENT",),
    "_shards": ("fill_shard", "join", "layer_name", "read_shard", "shard_parts", "slab_tensors"),
    "_sources": ("find_sources",),
    "_threads": ("in_threads",),
    "_views": ("Renamed",),
    "_write": ("Part",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__getattr__, __dir__ = on_use(globals(), _WHERE)
