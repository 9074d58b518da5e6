"""Orbax checkpoints of sharded states: tensors without padding, saved on some devices, restored on others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from models import make_mesh, poison_padding

import ragged_jax as rj
from ragged_jax.exchange import global_arrays


def tree(rng: np.random.Generator) -> dict:
    return {
        "embed": rng.normal(size=(33, 7)).astype(np.float32),
        "layers": {"w": rng.normal(size=(3, 12, 5)).astype(np.float32), "b": rng.integers(0, 9, (3, 5), np.int32)},
        "half": jnp.asarray(rng.normal(size=(40, 8)), jnp.bfloat16),
        "fp8": jnp.asarray(rng.normal(size=(16, 16)), jnp.float8_e4m3fn),
        "scale": np.float32(2.5),
        "none": np.zeros((0, 3), np.int8),
    }


def state(params: dict, num_devices: int, stacked: bool, seed: int) -> dict:
    units = {"units": "layers", "stacked": "layers"} if stacked else {"block": rj.rows(2)}
    sharded = rj.shard_tree(params, make_mesh(num_devices), axis="fsdp", **units)
    moments = optax.adam(1e-3).init(sharded)[0]._replace(mu=jax.tree.map(lambda x: x + x, sharded))
    return {"params": sharded, "opt": moments, "key": jax.random.key(seed), "step": seed, "host": np.arange(seed)}


def leaves(state: dict) -> list:
    whole = rj.full_params(state["params"]), rj.full_params(state["opt"].mu), int(state["opt"].count)
    data = jax.tree.leaves([whole, jax.random.key_data(state["key"]), state["step"], state["host"]])
    return [(np.shape(x), np.asarray(x).dtype, np.asarray(x).tobytes()) for x in data]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saved on 4 devices, layers stacked, with NaN in the padding."""
    path = tmp_path_factory.mktemp("orbax") / "state"
    before = state(tree(np.random.default_rng(0)), 4, stacked=True, seed=7)
    params = before["params"]
    before["params"] = params.replace(poison_padding(params.unit, params.slabs), params.children)
    rj.save_orbax(path, before)
    return path, before


@pytest.mark.parametrize(("num_devices", "stacked"), [(3, False), (7, True)])
def test_restored_on_other_devices(saved, num_devices, stacked):
    path, before = saved
    zeros = jax.tree.map(jnp.zeros_like, tree(np.random.default_rng(0)))
    after = rj.load_orbax(path, state(zeros, num_devices, stacked, seed=7))
    assert leaves(after) == leaves(before)


def test_anybody_reads_the_tensors(saved):
    """With Orbax alone; none has padding, and those that divide were saved in parts."""
    path, before = saved
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.metadata(path).item_metadata.tree["params"]
        arrays = checkpointer.restore(path)
    want = rj.full_params(before["params"])
    assert arrays["params"]["embed"].tobytes() == want["embed"].tobytes()
    assert np.array_equal(arrays["params"]["layers"]["1"]["w"], want["layers"]["w"][1])
    assert found["half"].storage.chunk_shape == (10, 8)
    assert found["embed"].shape == found["embed"].storage.chunk_shape == (33, 7)


def test_what_another_program_saved(tmp_path):
    """By another checkpointer, in its other file formats; and back from arrays that Orbax has restored."""
    params = tree(np.random.default_rng(1)) | {"none": np.zeros(1, np.float32)}
    like = rj.shard_tree(jax.tree.map(jnp.zeros_like, params), make_mesh(5), axis="fsdp")
    for number, options in enumerate(({"use_ocdbt": False}, {"use_zarr3": True})):
        path = tmp_path / str(number)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(params))
        got = rj.full_params(rj.load_orbax(path, like))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    arrays = global_arrays({"params": rj.shard_tree(params, make_mesh(2), axis="fsdp")})
    back = rj.redistribute(arrays, {"params": like})["params"]
    assert np.array_equal(rj.full_params(back)["embed"], params["embed"])


def test_what_does_not_fit(saved, tmp_path):
    path, _ = saved
    with pytest.raises(rj.CheckpointError) as caught:
        rj.load_orbax(path, {"params": {"embed": jnp.zeros((3, 7)), "half": jnp.zeros((40, 8))}, "more": np.ones(1)})
    for fault in (
        "embed: saved with shape (33, 7)",
        "half: saved as bfloat16, wanted as float32",
        "no tensor 'more'",
    ):
        assert fault in str(caught.value)
    with pytest.raises(rj.CheckpointError, match="no _METADATA there"):
        rj.load_orbax(tmp_path, {})
    params = rj.shard_tree({"w": jnp.ones((64, 256))}, make_mesh(2), axis="fsdp", block=rj.elements(256))
    with pytest.raises(ValueError, match="would lose how these are quantised; use `Checkpointer`: opt/"):
        global_arrays({"opt": rj.optim.scale_by_adam8bit().init(params)})


def test_without_orbax(saved, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'ragged-jax\[orbax\]'"):
        rj.load_orbax(saved[0], {})
