"""Fully sharded training for JAX that cuts a tensor only where its structure allows.

Public names load on first use, so that `ragged_jax.layout` and `ragged_jax.planner` work without JAX.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ._on_use import on_use

if TYPE_CHECKING:
    from . import optim as optim
    from .adapters import PackedTensor as PackedTensor
    from .adapters import fully_shard as fully_shard
    from .adapters import labelled as labelled
    from .checkpoint import Checkpoint as Checkpoint
    from .checkpoint import CheckpointError as CheckpointError
    from .exchange import Checkpointer as Checkpointer
    from .exchange import load_huggingface as load_huggingface
    from .exchange import load_orbax as load_orbax
    from .exchange import redistribute as redistribute
    from .exchange import save_huggingface as save_huggingface
    from .exchange import save_orbax as save_orbax
    from .fsdp import DynamicLossScale as DynamicLossScale
    from .fsdp import MixedPrecision as MixedPrecision
    from .fsdp import ShardedTree as ShardedTree
    from .fsdp import all_finite as all_finite
    from .fsdp import apply as apply
    from .fsdp import check_same_on_all_processes as check_same_on_all_processes
    from .fsdp import combine as combine
    from .fsdp import compiler_options as compiler_options
    from .fsdp import describe as describe
    from .fsdp import find_nonfinite as find_nonfinite
    from .fsdp import full_params as full_params
    from .fsdp import get as get
    from .fsdp import get_layout as get_layout
    from .fsdp import norms as norms
    from .fsdp import offload as offload
    from .fsdp import partition as partition
    from .fsdp import plan as plan
    from .fsdp import quantisation_error as quantisation_error
    from .fsdp import replicated as replicated
    from .fsdp import shard_like as shard_like
    from .fsdp import shard_tree as shard_tree
    from .fsdp import to_memory as to_memory
    from .fsdp import unshard as unshard
    from .fsdp import unsharded as unsharded
    from .fsdp import value_and_grad as value_and_grad
    from .fsdp import varying as varying
    from .layout import Block as Block
    from .layout import Layout as Layout
    from .layout import LayoutError as LayoutError
    from .layout import NameMap as NameMap
    from .layout import RaggedShard as RaggedShard
    from .layout import elements as elements
    from .layout import rows as rows
    from .layout import tile as tile
    from .layout import whole as whole

__version__ = version("ragged-jax")

_HOME = {
    "adapters": ("PackedTensor", "fully_shard", "labelled"),
    "checkpoint": ("Checkpoint", "CheckpointError"),
    "exchange": (
        "Checkpointer",
        "load_huggingface",
        "load_orbax",
        "redistribute",
        "save_huggingface",
        "save_orbax",
    ),
    "fsdp": (
        "DynamicLossScale",
        "MixedPrecision",
        "ShardedTree",
        "all_finite",
        "apply",
        "check_same_on_all_processes",
        "combine",
        "compiler_options",
        "describe",
        "find_nonfinite",
        "full_params",
        "get",
        "get_layout",
        "norms",
        "offload",
        "partition",
        "plan",
        "quantisation_error",
        "replicated",
        "shard_like",
        "shard_tree",
        "to_memory",
        "unshard",
        "unsharded",
        "value_and_grad",
        "varying",
    ),
    "layout": ("Block", "Layout", "LayoutError", "NameMap", "RaggedShard", "elements", "rows", "tile", "whole"),
}
_WHERE = {"optim": "optim", **{name: package for package, names in _HOME.items() for name in names}}

_load, __dir__ = on_use(globals(), _WHERE)


def __getattr__(name: str) -> Any:
    if name in _HOME["fsdp"]:
        import_module(f"{__name__}.adapters")  # they register their models with the functions of fsdp
    return _load(name)
