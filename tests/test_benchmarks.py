"""Every benchmark that needs no compiler of an accelerator still runs, in its smallest form (deep profile)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALLEST = [
    "accumulation",
    "adam8bit --numel 65536 --rounds 1 --cpu-time",
    "checkpoint --mib 16 --rounds 1",
    "init_memory --devices 2 --layers 2 --width 64",
    "muon --devices 2 --layers 1 --widths 64 --rounds 1",
    "optimizer_study --seeds 1 --steps 2 --depth 1 --width 64",
    "padding --models gpt2_124m --shards 8 --blocks row",
    "step_time --devices 2 --variants scan --dtypes float32 --layers 1 --rounds 1",
    "torch_cuda --world 2 --width 64 --rounds 2 --steps 1 --peaks 1",
    "torch_optim --layers 1 --widths 64 --rounds 1",
]


@pytest.mark.deep
@pytest.mark.parametrize("command", SMALLEST, ids=lambda command: command.split()[0])
def test_runs(command, tmp_path):
    name, *options = command.split()
    if name.startswith("torch"):
        pytest.importorskip("torch", reason="the torch extra is not installed")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        timeout=280,
        text=True,
        stdout=-1,
        stderr=subprocess.STDOUT,
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.deep
def test_the_comparison_of_optimizers_draws_its_picture(tmp_path):
    command = [sys.executable, "examples/optimizers.py", "--steps", "4", "--length", "16", "--out", str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=280)
    assert (tmp_path / "optimizers.png").read_bytes().startswith(b"\x89PNG")
    header, *rows = (tmp_path / "optimizers.csv").read_text().splitlines()
    assert len(rows) == 4
    assert len(header.split(",")) >= 4
