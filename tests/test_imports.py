"""The core knows no framework, and the public surface is frozen."""

import inspect
import subprocess
import sys

import pytest

import ragged_jax as rj

PROBE = """
import sys
{imports}
bad = sorted(set(sys.modules) & {{"jax", "jaxlib", "flax", "optax", "torch"}})
sys.exit(f"brought in {{bad}}" if bad else 0)
"""


def probe(imports: str) -> subprocess.CompletedProcess:
    """In a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", PROBE.format(imports=imports)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "module",
    [
        "ragged_jax",
        "ragged_jax.layout",
        "ragged_jax.planner",
        "ragged_jax.checkpoint",
        "ragged_jax.optim",
        "ragged_jax.optim._reference",
        "ragged_jax.optim._muon_reference",
        "ragged_jax.optim._blocks",
        "ragged_jax.optim._routes",
    ],
)
def test_the_core_imports_no_framework(module):
    result = probe(f"import {module}")
    assert result.returncode == 0, result.stderr


def test_using_the_core_imports_no_framework():
    result = probe(
        "from ragged_jax.layout import *\nfrom ragged_jax import layout, planner\n"
        "spec = layout.TensorSpec('w', (100, 8), 'bfloat16', layout.rows(3))\n"
        "made = planner.plan([planner.Group('', (spec,))], 7)\n"
        "layout.Layout.from_json(made.layout.to_json()); planner.plan_table(made)\n"
        "from ragged_jax import checkpoint\nimport tempfile, numpy as np\n"
        "part = checkpoint.Part('w', ((0, 3),), np.zeros(3, np.float32))\n"
        "folder = checkpoint.CheckpointDirectory(tempfile.mkdtemp())\n"
        "checkpoint.read_tensor(folder.save(1, {'w': checkpoint.TensorEntry('float32', (3,))}, [part]), 'w')"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["ragged_jax.fsdp", "optax"])
def test_the_probe_can_fail(module):
    result = probe(f"import {module}")
    assert result.returncode != 0
    assert "brought in" in result.stderr


@pytest.mark.parametrize(("imports", "passes"), [("torch_bridge", True), ("torch_bridge, jax", False)])
def test_jax_stays_out_of_the_torch_bridge(imports, passes):
    pytest.importorskip("torch", reason="the torch extra is not installed")
    result = probe(f"import {imports}; [sys.modules.pop(m, None) for m in list(sys.modules) if m == 'torch']")
    assert (result.returncode == 0) == passes, result.stderr


@pytest.mark.parametrize(("imports", "passes"), [("ragged_jax.fsdp, ragged_jax.adapters", True), ("torch", False)])
def test_torch_stays_out(tmp_path, imports, passes):
    """With a torch there to be imported, whether or not the real one is installed."""
    (tmp_path / "torch.py").touch()
    forget = "[sys.modules.pop(m, None) for m in ('jax', 'jaxlib', 'flax', 'optax')]"
    result = probe(f"sys.path.insert(0, {str(tmp_path)!r}); import {imports}; {forget}")
    assert (result.returncode == 0) == passes, result.stderr


def test_the_public_surface():
    """Change it knowingly: these names are promises."""
    names = sorted({*rj._WHERE, "optim"})
    assert all(hasattr(rj, name) for name in names)
    assert names == [
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
    assert sorted(set(dir(rj.optim)) - {name for name in vars(rj.optim) if name not in rj.optim._WHERE}) == [
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
    assert all(hasattr(rj.optim, name) for name in rj.optim._WHERE)
