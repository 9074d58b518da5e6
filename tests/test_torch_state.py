"""States of `torch_bridge` on gloo: in checkpoints, from and to JAX, and before there are any values."""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from models import Block, OddModel, make_mesh, make_sharded
from torch_jobs import run_ranks

import ragged_jax as rj
from ragged_jax.exchange._state import items_of

pytest.importorskip("torch", reason="the torch extra is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def state_on(num_devices: int, seed: int, kind: str = "adamw") -> dict:
    """A model, its optimizer's state and a key, all of random bits; counters are 9."""
    rng = np.random.default_rng(seed)
    if kind == "muon":
        model = make_sharded(num_devices, rj.elements(256))  # the optimizers share slabs
        tx = rj.optim.muon(0.02, adamw=rj.optim.adamw8bit(3e-3))
    else:
        model, tx = make_sharded(num_devices), optax.adamw(3e-3)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for node in (model, optimizer):
        nnx.update(node, jax.tree.map(lambda x: _random(rng, x), nnx.state(node)))
    return {"model": model, "opt": optimizer, "key": jax.random.key(seed)}


def _random(rng: np.random.Generator, x: jax.Array) -> jax.Array:
    if x.dtype.kind == "f":
        bits = rng.standard_normal(x.shape)
    else:
        bits = rng.integers(0, 256, x.shape) if x.ndim else np.array(9)
    return jax.device_put(bits.astype(x.dtype), x.sharding)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A JAX job on 4 devices saves, three torch ranks do what their cases say, and save what the job saved."""
    path = tmp_path_factory.mktemp("states")
    with jax.set_mesh(make_mesh(4)):
        for kind in ("adamw", "muon"):
            with rj.Checkpointer(path / f"jax_{kind}") as checkpointer:
                checkpointer.save(5, state_on(4, 1, kind))
    for name, options in {"listed": {}, "stacked": {"stacked": Block}}.items():
        model = nnx.eval_shape(lambda scan=bool(options): OddModel(rngs=nnx.Rngs(0), scan=scan))
        (path / f"{name}.json").write_text(rj.plan(model, 3, units=Block, **options).layout.to_json())
    failed = run_ranks("state_cases.py", 3, path, str(path))
    assert not failed, "\n".join(f"{where}\n{trace}" for where, trace in failed.items())
    return path


@pytest.mark.parametrize(("layout", "kind"), [("listed", "adamw"), ("stacked", "adamw"), ("own", "muon")])
def test_there_and_back(folder, layout, kind):
    """From 4 devices to 3 ranks to 2 devices: the same bits."""
    with jax.set_mesh(make_mesh(2)):
        like = state_on(2, 2, kind)
        got = rj.Checkpointer(folder / f"torch_{layout}").restore(like)
        with rj.Checkpointer(folder / f"back_{layout}") as checkpointer:
            checkpointer.save(7, got)
        names = {name for item in items_of(like)[0] for name in item.tensors()}
    with (
        rj.Checkpoint(folder / f"jax_{kind}" / "step_00000005") as first,
        rj.Checkpoint(folder / f"back_{layout}" / "step_00000007") as last,
    ):
        assert set(first) == set(last) == names
        for name in names:
            assert first.read(name).tobytes() == last.read(name).tobytes(), name


def test_a_real_model_is_the_same_in_both_frameworks(folder):
    """all-MiniLM-L6-v2 on 4 devices: the vectors that 3 ranks made."""
    from minilm import embed, load
    from sentences import EXAMPLES, FOLDER, encode

    model = load(FOLDER, make_mesh(4))
    got = np.asarray(rj.apply(embed)(model, *encode(EXAMPLES, 4)))[: len(EXAMPLES)]
    np.testing.assert_allclose(np.load(folder / "vectors.npy"), got, atol=1e-5, rtol=0)
