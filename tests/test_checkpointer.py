"""JAX states in checkpoints: saved on some devices, restored on others, and training goes on as before."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from models import batches, flat, loss_fn, make_mesh, make_sharded, poison_padding, units_of

import ragged_jax as rj
from ragged_jax.checkpoint import CheckpointDirectory
from ragged_jax.cli import main
from ragged_jax.exchange._state import items_of

STEPS, SAVED_AT = 4, 2
DATA = batches(STEPS, size=24)


@nnx.jit
def train_step(model, optimizer, tokens):
    loss, grads = rj.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def make(num_devices: int, scan: bool):
    """A model and its optimizer."""
    model = make_sharded(num_devices, scan=scan)
    return model, nnx.Optimizer(model, optax.adamw(3e-3, eps=1e-4), wrt=nnx.Param)


def train(model, optimizer, data) -> list[float]:
    return [float(train_step(model, optimizer, tokens)) for tokens in data]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Losses of training on 4 devices, layers in a list, and the directory of a checkpoint from the middle."""
    path = tmp_path_factory.mktemp("run")
    with jax.set_mesh(make_mesh(4)), rj.Checkpointer(path) as checkpointer:
        model, optimizer = make(4, scan=False)
        losses = train(model, optimizer, DATA[:SAVED_AT])
        checkpointer.save(SAVED_AT, {"model": model, "opt": optimizer}, metadata={"position": SAVED_AT})
        losses += train(model, optimizer, DATA[SAVED_AT:])
    return losses, path, model


@pytest.mark.parametrize(("num_devices", "scan"), [(4, False), (3, True)])
def test_training_goes_on(unbroken, tmp_path, num_devices, scan):
    """On as many devices, bit for bit; on another number, with the layers stacked, to rounding."""
    losses, path, listed = unbroken
    with jax.set_mesh(make_mesh(num_devices)):
        model, optimizer = make(num_devices, scan)  # not trained
        state = rj.Checkpointer(path).restore({"model": model, "opt": optimizer})
        model, optimizer = state["model"], state["opt"]
        assert isinstance(optimizer, nnx.Optimizer)
        with rj.Checkpointer(tmp_path) as again:
            again.save(0, state)
        got = train(model, optimizer, DATA[SAVED_AT:])
    with rj.Checkpoint(path / "step_00000002") as first, rj.Checkpoint(tmp_path / "step_00000000") as second:
        assert set(first) == set(second)
        assert "opt/opt_state/0/mu/blocks/1/up/kernel" in first
        for name in first:
            assert first.read(name).tobytes() == second.read(name).tobytes(), name
        assert first.metadata == {"position": 2}
        in_a_list = rj.Checkpointer(tmp_path).restore({"model": nnx.state(listed)})["model"]
        for name, x in flat(rj.full_params(in_a_list, like=listed)).items():
            np.testing.assert_array_equal(x, first.read(f"model/{name}"))
    if (num_devices, scan) == (4, False):
        assert got == losses[SAVED_AT:]
        want = flat(rj.full_params(listed))
        assert all(np.array_equal(x, want[name]) for name, x in flat(rj.full_params(model)).items())
    else:
        np.testing.assert_allclose(got, losses[SAVED_AT:], rtol=2e-5)


def test_a_part_of_what_was_saved(unbroken):
    _, path, model = unbroken
    state = rj.Checkpointer(path).restore({"model": nnx.state(model)})["model"]
    with rj.Checkpoint(path / "step_00000002") as checkpoint:
        full = flat(rj.full_params(state, like=model))
        assert full
        for name, x in full.items():
            np.testing.assert_array_equal(x, checkpoint.read(f"model/{name}"))


def test_layers_are_left_out_on_purpose_only(tmp_path):
    """Of a list, of what is known to be a stack, and of layers that were a stack."""
    layers = [{"w": np.full((3, 5), float(i), np.float32), "b": np.full(3, float(i), np.float32)} for i in range(4)]
    stack = lambda num: {"layers": stack_of(layers[:num])}
    sharded = lambda tree: rj.shard_tree(tree, make_mesh(2), axis="fsdp", units="layers", stacked="layers")
    saved = {
        "a list": {"layers": layers, "other": [np.ones(2), np.ones(3)]},
        "a stack": stack(4) | {"other": [np.ones(2), np.ones(3)]},
        "a sharded stack": sharded(stack(4)),
    }
    for name, state in saved.items():
        with rj.Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save(1, state)
            like = jax.tree.map(np.zeros_like, {"layers": layers[:3]})
            for wanted in (like, sharded(jax.tree.map(np.zeros_like, stack(3)))):
                with pytest.raises(
                    rj.CheckpointError, match=r"4 layers saved, 3 wanted.*; `fewer_layers=True` leaves"
                ):
                    checkpointer.restore(wanted)
                got = checkpointer.restore(wanted, fewer_layers=True)
                got = rj.full_params(got) if isinstance(got, rj.ShardedTree) else got
                got = got["layers"] if isinstance(got["layers"], dict) else stack_of(got["layers"])
                jax.tree.map(np.testing.assert_array_equal, got, stack(3)["layers"])
            shapes = r"layers/w: saved with shape \(4, 3, 5\), wanted with \(3, 3, 5\)"
            with pytest.raises(rj.CheckpointError, match=shapes):
                checkpointer.restore(jax.tree.map(jnp.zeros_like, stack(3)), fewer_layers=True)
            assert name == "a sharded stack" or len(checkpointer.restore({"other": saved["a list"]["other"]})) == 1


def stack_of(layers: list) -> dict:
    return jax.tree.map(lambda *x: np.stack(x), *layers)


def random_tree(rng: np.random.Generator) -> dict:
    return {
        "embed": rng.normal(size=(33, 7)).astype(np.float32),
        "layers": {"w": rng.normal(size=(3, 12, 5)).astype(np.float32), "b": rng.integers(0, 9, (3, 5), np.int32)},
        "half": jnp.asarray(rng.normal(size=(40, 8)), jnp.bfloat16),
        "fp8": jnp.asarray(rng.normal(size=(16, 16)), jnp.float8_e4m3fn),
        "mask": rng.integers(0, 2, (13,)).astype(bool),
        "scale": np.float32(2.5),
        "none": np.zeros((0, 3), np.int8),
    }


def shard(tree: dict, num_devices: int, variant: int) -> rj.ShardedTree:
    """The same tree in several ways."""
    if variant == 0:
        return rj.shard_tree(tree, make_mesh(num_devices), axis="fsdp")
    if variant == 1:
        mesh, shares = make_mesh(num_devices), tuple(1 + k % 3 for k in range(num_devices))
        plan = rj.plan(tree, num_devices, shares=shares, units="layers", stacked="layers")
        return rj.shard_tree(tree, mesh, axis="fsdp", units="layers", stacked="layers", plan=plan)
    mesh = jax.make_mesh((2, num_devices // 2), ("replica", "fsdp"), devices=jax.devices()[:num_devices])
    return rj.shard_tree(tree, mesh, axis=("replica", "fsdp"), block=rj.tile(2, 4))


def state_of(tree: dict, num_devices: int, variant: int, seed: int) -> dict:
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    grid = np.random.default_rng(seed).normal(size=(6, 8, 4)).astype(np.float32)
    specs = [PartitionSpec("x", "y"), PartitionSpec(None, "y", "x"), PartitionSpec()]
    sharding = NamedSharding(mesh, specs[variant])
    params = shard(tree, num_devices, variant)
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params)[0]._replace(mu=jax.tree.map(lambda x: x + x, params)),
        "grid": jax.device_put(grid, sharding),
        "host": grid[0],
        "keys": (jax.random.key(seed), jax.random.split(jax.random.key(seed), 3)),
        "rngs": nnx.Rngs(seed, dropout=seed + 1),
        "numbers": [seed, seed / 7, bool(seed), np.int64(seed << 40)],
    }


def whole(state: dict) -> list[np.ndarray]:
    state = {**state, "params": rj.full_params(state["params"]), "rngs": nnx.state(state["rngs"])}
    state["opt"] = state["opt"]._replace(mu=rj.full_params(state["opt"].mu), nu=rj.full_params(state["opt"].nu))
    leaves = jax.tree.leaves(state)
    keys = [jnp.issubdtype(getattr(x, "dtype", np.dtype(bool)), jax.dtypes.prng_key) for x in leaves]
    return [np.asarray(jax.random.key_data(x) if key else x) for x, key in zip(leaves, keys, strict=True)]


def bits(arrays: list[np.ndarray]) -> list[tuple]:
    return [(x.shape, str(x.dtype), x.tobytes()) for x in arrays]


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ((1, 0), (5, 1)),
        ((7, 1), (4, 2)),
        ((8, 2), (3, 0)),
        pytest.param((6, 0), (8, 2), marks=pytest.mark.deep),
    ],
)
def test_every_kind_of_leaf_on_any_devices(tmp_path, saved, restored):
    tree = random_tree(np.random.default_rng(0))
    before = state_of(tree, *saved, seed=3)
    like = state_of(jax.tree.map(jnp.zeros_like, tree), *restored, seed=5)
    with rj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(10, before)
        after = checkpointer.restore(like)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            {name: like[name] for name in ("params", "keys")},
        )
        of_shapes = checkpointer.restore(abstract)
        assert bits(whole({**after, **of_shapes})) == bits(whole(before))
        jax.random.bits(of_shapes["keys"][0])
    assert bits(whole(after)) == bits(whole(before))
    assert jax.tree.structure(after["params"]) == jax.tree.structure(like["params"])
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(like), strict=True):
        assert type(got) is type(want)
        if isinstance(got, jax.Array):
            assert got.sharding == want.sharding
    with CheckpointDirectory(tmp_path).open() as checkpoint:
        assert checkpoint.verify() == []
        assert {layout.num_shards for layout in checkpoint.layouts.values()} == {
            saved[0] // (2 if saved[1] == 2 else 1)
        }


def test_padding_does_not_reach_a_checkpoint(tmp_path):
    tree = rj.shard_tree({"w": jnp.ones((5, 3)), "b": jnp.ones(4)}, make_mesh(4), axis="fsdp", block=rj.rows(2))
    (unit,) = units_of(tree)
    poisoned = tree.replace(poison_padding(unit, tree.slabs), {})
    assert any(np.isnan(x).any() for x in jax.tree.leaves(poisoned))
    with rj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, poisoned)
        restored = checkpointer.restore(poisoned)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(restored))


def test_each_device_reads_its_own_part(tmp_path, monkeypatch):
    value = np.arange(16 << 18, dtype=np.float32).reshape(16, -1)
    like = rj.shard_tree({"w": jnp.zeros_like(value)}, make_mesh(8), axis="fsdp")
    with rj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, rj.shard_tree({"w": value}, make_mesh(3), axis="fsdp"))
        checkpointer.wait()
        sizes, real = [], os.preadv
        monkeypatch.setattr(os, "preadv", lambda *args: sizes.append(real(*args)) or sizes[-1])
        restored = checkpointer.restore(like)
    assert np.array_equal(rj.full_params(restored)["w"], value)
    assert value.nbytes <= sum(sizes) <= value.nbytes + (8 << 20)
    assert max(sizes) <= value.nbytes // 8


def test_devices_do_not_share_what_was_read(tmp_path):
    """Each has memory of its own, so that a donated counter is counted up once."""
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"))
    count = jax.device_put(np.arange(1024), NamedSharding(mesh, PartitionSpec()))
    params = rj.shard_tree({"w": np.arange(4096.0)}, mesh, axis=("replica", "fsdp"))
    add_one = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    with rj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"count": count, "params": params})
        state = checkpointer.restore({"count": count, "params": params})
    pointers = [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(state) for s in x.addressable_shards]
    assert len(set(pointers)) == len(pointers)
    state = add_one(state)
    for shard in state["count"].addressable_shards:
        assert np.array_equal(shard.data, np.arange(1, 1025))
    assert np.array_equal(rj.full_params(state["params"])["w"], np.arange(1.0, 4097.0))


def test_what_does_not_fit_is_named_at_once(tmp_path):
    with rj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, {"a": jnp.ones((2, 3)), "b": jnp.ones(3, jnp.bfloat16), "k": jax.random.key(0), "n": 1})
        like = {
            "a": jnp.ones((3, 2)),
            "b": jnp.ones(3),
            "bb": jnp.ones(3),
            "k": jax.random.key(0, impl="rbg"),
            "n": 2,
        }
        with pytest.raises(rj.CheckpointError) as caught:
            checkpointer.restore(like)
        message = str(caught.value)
        assert "a: saved with shape (2, 3), wanted with (3, 2)" in message
        assert "b: saved as bfloat16, wanted as float32; `cast=True` would convert it" in message
        assert "no tensor 'bb'; did you mean b?" in message
        assert "k: saved with shape (2,), wanted with (4,)" in message
        restored = checkpointer.restore({"b": jnp.zeros(3), "n": 0}, cast=True)
        assert restored["b"].dtype == jnp.float32
        assert np.array_equal(restored["b"], np.ones(3))
        assert type(restored["n"]) is int
        assert restored["n"] == 1
        tree = rj.shard_tree({"b": jnp.zeros(3)}, make_mesh(2), axis="fsdp")
        with pytest.raises(rj.CheckpointError, match="saved as bfloat16"):
            checkpointer.restore(tree)
        assert np.array_equal(rj.full_params(checkpointer.restore(tree, cast=True))["b"], np.ones(3))
        with pytest.raises(TypeError, match="name: str\n  other: object"):
            checkpointer.save(5, {"name": "x", "other": object()})
        with pytest.raises(TypeError, match="name: str\n  n: more than 64 bits"):
            checkpointer.save(5, {"n": 2**63, "name": "x", "m": -(2**63)})
        with pytest.raises(ValueError, match=r"(?s)o: unknown dtype 'object'.*w: unknown dtype 'int4'"):
            checkpointer.save(5, {"o": np.array([None]), "w": jnp.ones(3, jnp.int4)})  # not by the next call
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpointer.save(5, {}, metadata={"x": object()})
        with pytest.raises(FileNotFoundError, match="no checkpoint of step 9"):
            checkpointer.restore(like, step=9)


def test_a_python_number_has_no_width(tmp_path):
    """A step of 0 that jit counted on is an int32."""
    with rj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"step": jnp.int32(3), "rate": np.float64(0.5)})
        restored = checkpointer.restore({"step": 0, "rate": 0.0})
        assert restored == {"step": 3, "rate": 0.5}
        assert type(restored["step"]) is int
        with pytest.raises(rj.CheckpointError, match=r"rate: saved as float64, wanted as int64; `cast=True`"):
            checkpointer.restore({"step": 0, "rate": 0})


def test_the_background_does_not_see_later_changes(tmp_path, monkeypatch):
    """A donated state is overwritten while the thread has not written a byte yet."""
    go, real = threading.Event(), CheckpointDirectory.save
    monkeypatch.setattr(CheckpointDirectory, "save", lambda *args, **kw: go.wait(20) and real(*args, **kw))
    tree = rj.shard_tree({"w": jnp.full((64, 64), 7.0)}, make_mesh(4), axis="fsdp")
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    with rj.Checkpointer(tmp_path) as checkpointer:
        host, losses = np.ones(3), [1.5]
        checkpointer.save(1, {"tree": tree, "host": host}, {"losses": losses})
        host[:] = 0
        losses.append(2.5)
        tree = jax.block_until_ready(step(tree))
        assert not any(tmp_path.iterdir())
        go.set()
        restored = checkpointer.restore({"tree": tree, "host": host})
    assert (rj.full_params(restored["tree"])["w"] == 7).all()
    assert (restored["host"] == 1).all()
    with CheckpointDirectory(tmp_path).open() as checkpoint:
        assert checkpoint.metadata == {"losses": [1.5]}


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path):
    checkpointer = rj.Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpointer.save(step, {"x": step})
    assert checkpointer.steps() == [2, 3]
    checkpointer.save(3, {"x": 3})
    with pytest.raises(FileExistsError, match="a checkpoint of step 3 already"):
        checkpointer.save(4, {"x": 4})
    assert checkpointer.latest() == 3  # raised once
    with pytest.raises(FileExistsError), rj.Checkpointer(tmp_path, background=False) as other:
        other.save(2, {"x": 2})
    with pytest.raises(ValueError, match="keep=0"):
        rj.Checkpointer(tmp_path, keep=0)


EXIT = """
import sys, jax.numpy as jnp, ragged_jax as rj
rj.Checkpointer(sys.argv[1]).save(1, {"x": jnp.arange(1 << 20)})
"""


def test_a_process_that_ends_finishes_its_save(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", EXIT, str(tmp_path)], check=True, timeout=120, env=environment)
    with CheckpointDirectory(tmp_path).open(1) as checkpoint:
        assert np.array_equal(checkpoint.read("x"), np.arange(1 << 20))


def test_the_command_shows_it(unbroken, capsys, tmp_path):
    _, path, _ = unbroken
    assert main(["show", str(path), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "steps 2; the latest that is whole:" in out
    assert "opt/opt_state/0/mu" in out
    assert "4 shards" in out
    assert "every byte is as it was written" in out
    copy = Path(shutil.copytree(path / "step_00000002", tmp_path / "copy"))
    assert main(["show", str(copy), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["tensors"]["model/embed/embedding"] == {
        "dtype": "float32", "shape": [1601, 48], "nbytes": 1601 * 48 * 4,
    }  # fmt: skip
    data = bytearray((copy / "root.00000.safetensors").read_bytes())
    data[-1000] ^= 1
    (copy / "root.00000.safetensors").write_bytes(data)
    assert main(["show", str(copy), "--verify"]) == 1
    assert "root.00000.safetensors, bytes" in capsys.readouterr().out
    (copy / "root.00000.safetensors").unlink()
    assert main(["show", str(copy)]) == 2
    assert "root.00000.safetensors: No such file" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 2
    assert "manifest.json: No such file" in capsys.readouterr().err


def test_parts_of_a_model_are_refused(unbroken):
    _, _, model = unbroken
    with pytest.raises(ValueError, match="save the whole model"):
        items_of({"layer": nnx.state(model)["blocks"][0]})
