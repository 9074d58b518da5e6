"""The same layouts in PyTorch: fully sharded modules on `torch.distributed`.

Imports `ragged_jax.layout`, `.planner` and `.checkpoint`, which know no framework, and never jax.
"""

from . import optim as optim
from ._checkpointer import Checkpointer as Checkpointer
from ._clip import clip_grad_norm_ as clip_grad_norm_
from ._deferred import init_parameters as init_parameters
from ._flax_names import flax_names as flax_names
from ._fully_shard import forget_gradients as forget_gradients
from ._fully_shard import fully_shard as fully_shard
from ._fully_shard import get_layout as get_layout
from ._fully_shard import set_requires_gradient_sync as set_requires_gradient_sync
from ._huggingface import load_huggingface as load_huggingface
from ._item import AsSaved as AsSaved
from ._layouts import load_layout as load_layout
from ._placement import RaggedShard as RaggedShard
from ._plan import plan_module as plan_module
from ._ragged_state import ragged_optimizer_state_dict as ragged_optimizer_state_dict
from ._ragged_state import ragged_state_dict as ragged_state_dict
from ._ragged_tensor import RaggedTensor as RaggedTensor
from ._state import full_state_dict as full_state_dict
from ._state import unsharded as unsharded
from ._state_names import ADAM as ADAM
from ._state_names import ADAMW as ADAMW
from ._state_names import MUON as MUON
from ._state_names import StateNames as StateNames
