"""States of `torch_bridge` on gloo: in checkpoints, from and to JAX, and before there are any values."""

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


def state_on(num_devices: int, seed: int) -> dict:
    """A model, AdamW's state and a key, all of random bits."""
    rng = np.random.default_rng(seed)
    model = make_sharded(num_devices)
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    for node in (model, optimizer):
        nnx.update(node, jax.tree.map(lambda x: _random(rng, x), nnx.state(node)))
    model.num_calls[...] = 3
    optimizer.step[...] = optimizer.opt_state[0].count[...] = 9
    return {"model": model, "opt": optimizer, "key": jax.random.key(seed)}


def _random(rng: np.random.Generator, x: jax.Array) -> jax.Array:
    return jax.device_put(rng.standard_normal(x.shape).astype(x.dtype), x.sharding)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A JAX job on 4 devices saves, three torch ranks do what their cases say, and save what the job saved."""
    path = tmp_path_factory.mktemp("states")
    with jax.set_mesh(make_mesh(4)), rj.Checkpointer(path / "jax") as checkpointer:
        checkpointer.save(5, state_on(4, seed=1))
    for name, options in {"listed": {}, "stacked": {"stacked": Block}}.items():
        model = nnx.eval_shape(lambda scan=bool(options): OddModel(rngs=nnx.Rngs(0), scan=scan))
        (path / f"{name}.json").write_text(rj.plan(model, 3, units=Block, **options).layout.to_json())
    failed = run_ranks("state_cases.py", 3, path, str(path))
    assert not failed, "\n".join(f"{where}\n{trace}" for where, trace in failed.items())
    return path


@pytest.mark.parametrize("layout", ["listed", "stacked"])
def test_there_and_back(folder, layout):
    """From 4 devices to 3 ranks to 2 devices: the same bits."""
    with jax.set_mesh(make_mesh(2)):
        like = state_on(2, seed=2)
        got = rj.Checkpointer(folder / f"torch_{layout}").restore(like)
        with rj.Checkpointer(folder / f"back_{layout}") as checkpointer:
            checkpointer.save(7, got)
        names = {name for item in items_of(like)[0] for name in item.tensors()}
    with (
        rj.Checkpoint(folder / "jax" / "step_00000005") as first,
        rj.Checkpoint(folder / f"back_{layout}" / "step_00000007") as last,
    ):
        assert set(first) == set(last) == names
        for name in names:
            assert first.read(name).tobytes() == last.read(name).tobytes(), name
