"""Optax transforms that know what lies where: Muon, any optimizer of whole tensors, masks and norms by tensor.

Public names load on first use, so that what needs numpy alone can be imported without JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._forms import MatrixDims as MatrixDims
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
    from ._routing import Routing as Routing
    from ._routing import routing as routing
    from ._with_tensors import with_tensors as with_tensors

_WHERE = {
    "MatrixDims": "_forms",
    "MuonState": "_muon",
    "Routing": "_routing",
    "add_decayed_weights": "_masks",
    "clip_by_global_norm": "_norms",
    "global_norm": "_norms",
    "labels": "_masks",
    "mask": "_masks",
    "muon": "_muon",
    "muon_reference": "_muon_reference",
    "newton_schulz_reference": "_muon_reference",
    "partition": "_masks",
    "routing": "_routing",
    "scale_by_muon": "_muon",
    "scale_by_path": "_masks",
    "tensor_norms": "_norms",
    "with_tensors": "_with_tensors",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
