"""The same layouts in PyTorch: fully sharded modules on `torch.distributed`.

Imports `ragged_jax.layout` and `ragged_jax.planner`, which know no framework, and never jax.
"""

from ._clip import clip_grad_norm_ as clip_grad_norm_
from ._fully_shard import forget_gradients as forget_gradients
from ._fully_shard import fully_shard as fully_shard
from ._fully_shard import get_layout as get_layout
from ._fully_shard import set_requires_gradient_sync as set_requires_gradient_sync
from ._placement import RaggedShard as RaggedShard
from ._plan import plan_module as plan_module
from ._ragged_state import ragged_optimizer_state_dict as ragged_optimizer_state_dict
from ._ragged_state import ragged_state_dict as ragged_state_dict
from ._ragged_tensor import RaggedTensor as RaggedTensor
from ._state import full_state_dict as full_state_dict
from ._state import unsharded as unsharded
