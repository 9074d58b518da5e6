"""Compiling ahead of time for machines that are not here: runs where a compiler is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CASES = {
    "v5p": ("libtpu", "pip install 'libtpu==0.0.42.*'", 16),
    "h100": (
        "jax_cuda12_plugin",
        "pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12",
        8,
    ),
}
VARIANTS = ("named_sharding + options", "ragged + options")


@pytest.mark.timeout(900)  # a minute on a machine at rest
@pytest.mark.parametrize("target", CASES)
def test_the_small_model_compiles_and_hides_its_collectives(target, tmp_path):
    module, install, devices = CASES[target]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"no compiler for {target}: {install}")
    command = [sys.executable, str(BENCHMARKS / "aot.py"), "--out", str(tmp_path / "aot")]
    command += ["--target", target, "--devices", str(devices), "--model", "small"]
    for variant in VARIANTS:
        command += ["--variant", variant]
    environment = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["variant"]: row for row in json.loads((tmp_path / "aot.json").read_text())["rows"]}
    assert rows.keys() == set(VARIANTS), done.stderr[-2000:]
    baseline, ours = (rows[variant] for variant in VARIANTS)
    assert ours["exposed"] <= baseline["exposed"]
    assert ours["argument_nbytes"] <= 1.03 * ours["state_nbytes"] / devices
