"""The states of JAX jobs on the move: to disk and back, on any number of devices.

The files themselves are `ragged_jax.checkpoint`'s, which knows no framework.
"""

from ._checkpointer import Checkpointer as Checkpointer
from ._huggingface import load_huggingface as load_huggingface
from ._huggingface import save_huggingface as save_huggingface
from ._redistribute import redistribute as redistribute
