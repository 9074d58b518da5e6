"""`torch_bridge.fully_shard` on gloo: one job for each number of ranks, all cases inside, with a hard time limit."""

import pytest
from torch_jobs import run_ranks

pytest.importorskip("torch", reason="the torch extra is not installed")


@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.deep) for n in (1, 2)), 3, 4])
def test_equals_one_process(tmp_path, size):
    """Losses, parameters, gradients, norms and bytes: see the cases in the worker."""
    failed = run_ranks("fsdp_cases.py", size, tmp_path)
    assert not failed, "\n".join(f"{where}\n{trace}" for where, trace in failed.items())
