"""The core knows no framework, and the public surface is frozen."""

import inspect
import json
import subprocess
import sys

import pytest

import ragged_jax as rj

PROBE = """
import json, sys
def frameworks():
    return set(sys.modules) & {"jax", "jaxlib", "flax", "optax", "torch"}
for statements in sys.argv[1:]:
    before = frameworks()
    exec(statements, {})
    print(json.dumps(sorted(frameworks() - before)))
"""


def brought_in(*statements: str) -> list[list[str]]:
    """Of each, which frameworks it brings in; one after the other in a fresh interpreter."""
    command = [sys.executable, "-c", PROBE, *statements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


CORE = (
    "ragged_jax",
    "ragged_jax.layout",
    "ragged_jax.planner",
    "ragged_jax.checkpoint",
    "ragged_jax.optim",
    "ragged_jax.optim._reference",
    "ragged_jax.optim._muon_reference",
    "ragged_jax.optim._blocks",
    "ragged_jax.optim._routes",
)
USED = (
    "from ragged_jax.layout import *\nfrom ragged_jax import layout, planner\n"
    "spec = layout.TensorSpec('w', (100, 8), 'bfloat16', layout.rows(3))\n"
    "made = planner.plan([planner.Group('', (spec,))], 7)\n"
    "layout.Layout.from_json(made.layout.to_json()); planner.plan_table(made)\n"
    "from ragged_jax import checkpoint\nimport tempfile, numpy as np\n"
    "part = checkpoint.Part('w', ((0, 3),), np.zeros(3, np.float32))\n"
    "folder = checkpoint.CheckpointDirectory(tempfile.mkdtemp())\n"
    "checkpoint.read_tensor(folder.save(1, {'w': checkpoint.TensorEntry('float32', (3,))}, [part]), 'w')"
)


def test_the_core_imports_no_framework_and_the_rest_no_torch(tmp_path):
    """With a torch there to be imported, whether or not the real one is installed. The probe sees what comes in."""
    (tmp_path / "torch.py").touch()
    core = [f"import sys; sys.path.insert(0, {str(tmp_path)!r})", *(f"import {name}" for name in CORE), USED]
    *found, rest, torch = brought_in(*core, "import ragged_jax.fsdp, ragged_jax.adapters", "import torch")
    assert {statement: names for statement, names in zip(core, found, strict=True) if names} == {}
    assert rest == ["flax", "jax", "jaxlib", "optax"]
    assert torch == ["torch"]


def test_jax_stays_out_of_the_torch_bridge():
    pytest.importorskip("torch", reason="the torch extra is not installed")
    assert brought_in("import torch_bridge", "import jax") == [["torch"], ["jax", "jaxlib"]]


def test_the_public_surface():
    """Change it knowingly: these names are promises."""
    assert all(hasattr(rj, name) for name in dir(rj))
    assert rj.__all__ == dir(rj)  # also once they are loaded
    assert dir(rj) == [
        "Block",
        "Checkpoint",
        "CheckpointError",
        "Checkpointer",
        "DynamicLossScale",
        "Layout",
        "LayoutError",
        "MixedPrecision",
        "NameMap",
        "PackedTensor",
        "RaggedShard",
        "ShardedTree",
        "all_finite",
        "apply",
        "check_same_on_all_processes",
        "combine",
        "compiler_options",
        "describe",
        "elements",
        "find_nonfinite",
        "full_params",
        "fully_shard",
        "get",
        "get_layout",
        "labelled",
        "load_huggingface",
        "load_orbax",
        "norms",
        "offload",
        "optim",
        "partition",
        "plan",
        "quantisation_error",
        "redistribute",
        "replicated",
        "rows",
        "save_huggingface",
        "save_orbax",
        "shard_like",
        "shard_tree",
        "tile",
        "to_memory",
        "unshard",
        "unsharded",
        "value_and_grad",
        "varying",
        "whole",
    ]
    parameters = {
        name: list(inspect.signature(getattr(rj, name)).parameters) for name in ("fully_shard", "shard_tree")
    }
    assert parameters == {
        "fully_shard": [
            "model", "mesh", "axis", "units", "block", "stacked", "wrt", "plan", "reshard_after_forward", "policy",
            "precision", "label", "specs", "check_processes",
        ],
        "shard_tree": [
            "params", "mesh", "axis", "block", "units", "stacked", "plan", "precision", "reshard_after_forward",
            "policy", "label", "specs", "check_processes",
        ],
    }  # fmt: skip


def test_the_optimizers():
    assert rj.optim.__all__ == dir(rj.optim)
    assert dir(rj.optim) == [
        "CodeMap",
        "FusedOptimizer",
        "MatrixDims",
        "Moment8bit",
        "MuonState",
        "Routing",
        "ScaleByAdam8bitState",
        "StochasticRoundingState",
        "adamw8bit",
        "add_decayed_weights",
        "clip_by_global_norm",
        "code_map",
        "fused_adamw8bit",
        "global_norm",
        "labels",
        "mask",
        "muon",
        "muon_reference",
        "newton_schulz_reference",
        "partition",
        "routing",
        "scale_by_adam8bit",
        "scale_by_muon",
        "scale_by_path",
        "stochastic_round",
        "stochastic_rounding",
        "tensor_norms",
        "with_tensors",
    ]
    assert all(hasattr(rj.optim, name) for name in dir(rj.optim))
