"""States of `torch_bridge` on gloo: in checkpoints, from and to JAX, and before there are any values."""

import pytest
from torch_jobs import run_ranks

pytest.importorskip("torch", reason="the torch extra is not installed")


def test_states(tmp_path):
    """See the cases in the worker."""
    failed = run_ranks("state_cases.py", 3, tmp_path, str(tmp_path))
    assert not failed, "\n".join(f"{where}\n{trace}" for where, trace in failed.items())
