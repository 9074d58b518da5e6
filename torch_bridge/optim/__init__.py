"""Optimizers of sharded and ordinary parameters, with the state of `ragged_jax.optim` and optax."""

from ragged_jax.optim._forms import MatrixDims as MatrixDims
from ragged_jax.optim._routes import Routing as Routing

from ._adamw import AdamW as AdamW
from ._adamw8bit import AdamW8bit as AdamW8bit
from ._muon import Muon as Muon
from ._routing import routing as routing
from ._sharded import ShardedOptimizer as ShardedOptimizer
from ._sharded import StateTensor as StateTensor
