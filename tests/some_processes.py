"""What each of several processes runs for `test_processes.py`: it restores what two others saved."""

import sys
from pathlib import Path

import jax
import numpy as np

import ragged_jax as rj

if __name__ == "__main__":
    OUT, PORT, RANK, NUM = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    jax.distributed.initialize(f"localhost:{PORT}", NUM, RANK, heartbeat_timeout_seconds=10)
    mesh = jax.make_mesh((NUM,), ("fsdp",))
    zeros = {"w": np.zeros((5, 7), np.float32), "b": np.zeros(11, np.float32)}
    like = {"params": rj.shard_tree(zeros, mesh, axis="fsdp"), "step": 0}
    state = rj.Checkpointer(OUT / "of_two").restore(like)
    np.savez(OUT / f"restored{RANK}of{NUM}.npz", **rj.full_params(state["params"]), step=state["step"])
