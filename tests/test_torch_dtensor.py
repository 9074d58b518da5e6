"""`torch_bridge.RaggedTensor` on gloo: one job for each number of ranks, all cases inside, with a hard time limit."""

import subprocess
import sys

import pytest
from torch_jobs import run_ranks

torch = pytest.importorskip("torch", reason="the torch extra is not installed")


@pytest.mark.parametrize("size", [2, 4, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 3))])
def test_cases(tmp_path, size):
    """Values equal those of whole tensors, or an error names the operation: see the cases in the worker."""
    failed = run_ranks("dtensor_cases.py", size, tmp_path, timeout=240)
    assert not failed, "\n".join(f"{where}\n{trace}" for where, trace in failed.items())


def test_a_torch_that_passes_subclasses_by_is_refused():
    """The probe finds that operations do not arrive, and the import says what to do."""
    program = (
        "import torch\n"
        "from torch.distributed.tensor import DTensor\n"
        "class PassedBy(DTensor):\n"
        "    def __new__(cls, local, spec, *, requires_grad):\n"
        "        return local\n"
        "import torch.distributed.tensor as public\n"
        "public.DTensor = PassedBy\n"
        "import torch_bridge\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "use torch 2.13 or later" in result.stderr
