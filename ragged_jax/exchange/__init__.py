"""The states of JAX jobs on the move: to disk and back, on any number of devices.

The files themselves are `ragged_jax.checkpoint`'s, which knows no framework.
"""

from ._checkpointer import Checkpointer as Checkpointer
from ._huggingface import load_huggingface as load_huggingface
from ._huggingface import save_huggingface as save_huggingface
from ._orbax import global_arrays as global_arrays
from ._orbax import load_orbax as load_orbax
from ._orbax import save_orbax as save_orbax
from ._redistribute import redistribute as redistribute
