"""`torch_bridge.fully_shard` on gloo: one job for each number of ranks, all cases inside, with a hard time limit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")
WORKER = Path(__file__).parent / "torch_workers" / "fsdp_cases.py"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_one_process(tmp_path, size):
    """Losses, parameters, gradients, norms and bytes: see the cases in the worker."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])}
    files = [str(tmp_path / "store"), str(tmp_path / "out")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(WORKER), str(rank), str(size), *files],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = {}
    for rank, error in enumerate(errors):
        outcome = tmp_path / f"out.{rank}"
        assert outcome.exists(), f"rank {rank} left nothing behind:\n{error}"
        outcomes = json.loads(outcome.read_text())
        assert len(outcomes) >= 2
        failed |= {f"rank {rank}: {case}": trace for case, trace in outcomes.items() if trace}
    assert not failed, "\n".join(f"{where}\n{trace}" for where, trace in failed.items())
