"""optax transforms that know what lies where: 8-bit AdamW, Muon, any optimizer of whole tensors, masks and norms.

They work on sharded and on ordinary parameters. Public names load on first use, so that the numpy references work
without JAX.
"""

from typing import TYPE_CHECKING

from .._on_use import on_use

if TYPE_CHECKING:
    from ._adam8bit import FusedOptimizer as FusedOptimizer
    from ._adam8bit import adamw8bit as adamw8bit
    from ._adam8bit import fused_adamw8bit as fused_adamw8bit
    from ._adam8bit import scale_by_adam8bit as scale_by_adam8bit
    from ._adam8bit_state import Moment8bit as Moment8bit
    from ._adam8bit_state import ScaleByAdam8bitState as ScaleByAdam8bitState
    from ._forms import MatrixDims as MatrixDims
    from ._maps import CodeMap as CodeMap
    from ._maps import code_map as code_map
    from ._masks import add_decayed_weights as add_decayed_weights
    from ._masks import labels as labels
    from ._masks import mask as mask
    from ._masks import partition as partition
    from ._masks import scale_by_path as scale_by_path
    from ._muon import MuonState as MuonState
    from ._muon import muon as muon
    from ._muon import scale_by_muon as scale_by_muon
    from ._muon_reference import muon_reference as muon_reference
    from ._muon_reference import newton_schulz_reference as newton_schulz_reference
    from ._norms import clip_by_global_norm as clip_by_global_norm
    from ._norms import global_norm as global_norm
    from ._norms import tensor_norms as tensor_norms
    from ._routes import Routing as Routing
    from ._routing import routing as routing
    from ._stochastic import StochasticRoundingState as StochasticRoundingState
    from ._stochastic import stochastic_round as stochastic_round
    from ._stochastic import stochastic_rounding as stochastic_rounding
    from ._with_tensors import with_tensors as with_tensors

_WHERE = {
    "CodeMap": "_maps",
    "FusedOptimizer": "_adam8bit",
    "MatrixDims": "_forms",
    "Moment8bit": "_adam8bit_state",
    "MuonState": "_muon",
    "Routing": "_routes",
    "ScaleByAdam8bitState": "_adam8bit_state",
    "StochasticRoundingState": "_stochastic",
    "adamw8bit": "_adam8bit",
    "add_decayed_weights": "_masks",
    "clip_by_global_norm": "_norms",
    "code_map": "_maps",
    "fused_adamw8bit": "_adam8bit",
    "global_norm": "_norms",
    "labels": "_masks",
    "mask": "_masks",
    "muon": "_muon",
    "muon_reference": "_muon_reference",
    "newton_schulz_reference": "_muon_reference",
    "partition": "_masks",
    "routing": "_routing",
    "scale_by_adam8bit": "_adam8bit",
    "scale_by_muon": "_muon",
    "scale_by_path": "_masks",
    "stochastic_round": "_stochastic",
    "stochastic_rounding": "_stochastic",
    "tensor_norms": "_norms",
    "with_tensors": "_with_tensors",
}

__getattr__, __dir__ = on_use(globals(), _WHERE)
