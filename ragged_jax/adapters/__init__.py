"""How a model becomes buckets: Flax NNX and Linen modules here, plain pytrees in `fsdp`."""

from . import _nnx_relaid as _nnx_relaid
from ._fully_shard import fully_shard as fully_shard
from ._nnx_labels import labelled as labelled
from ._nnx_module import SLABS as SLABS
from ._nnx_module import PackedTensor as PackedTensor
