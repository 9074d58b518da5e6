"""The JAX runtime: ragged shards on `jax.shard_map`, gathered by bucket, reduced on the way back."""

from . import _check as _check
from ._argument import Argument as Argument
from ._argument import as_argument as as_argument
from ._generic import full_params as full_params
from ._generic import full_params_registry as full_params_registry
from ._generic import get_layout as get_layout
from ._generic import groups_of as groups_of
from ._generic import plan as plan
from ._generic import shard_like as shard_like
from ._generic import shard_like_registry as shard_like_registry
from ._generic import units_of as units_of
from ._layout import make_layout as make_layout
from ._layout import stack_length as stack_length
from ._remat import drop_unsharded as drop_unsharded
from ._remat import resharding as resharding
from ._spmd import fold_in_device as fold_in_device
from ._spmd import replicated as replicated
from ._transform import apply as apply
from ._transform import value_and_grad as value_and_grad
from ._tree import ShardedTree as ShardedTree
from ._tree import shard_tree as shard_tree
from ._unit import Unit as Unit
from ._unsharded import unshard as unshard
from ._unsharded import unsharded as unsharded
