"""Fully sharded training for JAX that cuts a tensor only where its structure allows.

Public names load on first use, so that `ragged_jax.layout` and `ragged_jax.planner` work without JAX.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import PackedTensor as PackedTensor
    from .adapters import fully_shard as fully_shard
    from .exchange import Checkpoint as Checkpoint
    from .exchange import Checkpointer as Checkpointer
    from .exchange import CheckpointError as CheckpointError
    from .fsdp import MixedPrecision as MixedPrecision
    from .fsdp import ShardedTree as ShardedTree
    from .fsdp import apply as apply
    from .fsdp import full_params as full_params
    from .fsdp import get_layout as get_layout
    from .fsdp import plan as plan
    from .fsdp import replicated as replicated
    from .fsdp import shard_like as shard_like
    from .fsdp import shard_tree as shard_tree
    from .fsdp import unshard as unshard
    from .fsdp import unsharded as unsharded
    from .fsdp import value_and_grad as value_and_grad
    from .layout import Block as Block
    from .layout import Layout as Layout
    from .layout import LayoutError as LayoutError
    from .layout import RaggedShard as RaggedShard
    from .layout import elements as elements
    from .layout import rows as rows
    from .layout import tile as tile
    from .layout import whole as whole

__version__ = version("ragged-jax")

_HOME = {
    "adapters": ("PackedTensor", "fully_shard"),
    "exchange": ("Checkpoint", "CheckpointError", "Checkpointer"),
    "fsdp": (
        "MixedPrecision",
        "ShardedTree",
        "apply",
        "full_params",
        "get_layout",
        "plan",
        "replicated",
        "shard_like",
        "shard_tree",
        "unshard",
        "unsharded",
        "value_and_grad",
    ),
    "layout": ("Block", "Layout", "LayoutError", "RaggedShard", "elements", "rows", "tile", "whole"),
}
_WHERE = {name: package for package, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOME["fsdp"]:
        import_module(f"{__name__}.adapters")  # they register their models with the functions of fsdp
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
