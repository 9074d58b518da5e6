"""8-bit optimizer state in checkpoints: by tensor, bit for bit, on any number of devices and in any layout."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import make_mesh

import ragged_jax as rj
from ragged_jax.optim._maps import code_map

ELEMENTS, TILES = rj.elements(256), rj.tile(8, 16)
SHAPES = {"norm": (7,), "up": (48, 20), "odd": (37, 52), "bias": (130,), "deep": (2, 24, 32), "none": (0, 4)}


def tree(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def transform(block):
    return rj.optim.scale_by_adam8bit(block=block, min_numel=256)


def shard(values: dict, num: int, block, **options):
    units = options.pop("units", None)
    planned = rj.plan(values, num, block=block, units=units, **options)
    return rj.shard_tree(values, make_mesh(num), axis="fsdp", block=block, units=units, plan=planned)


LAYOUTS = {
    "packed": (ELEMENTS, partial(shard, num=3, block=ELEMENTS)),
    "uneven": (ELEMENTS, partial(shard, num=4, block=ELEMENTS, shares=(2, 1, 1, 3))),
    "tiles in rows": (TILES, partial(shard, num=2, block=TILES, storage="row_major")),
    "tiles": (TILES, partial(shard, num=5, block=TILES, storage="tiled")),
}


def contents(path) -> dict[str, tuple]:
    with rj.Checkpointer(path).open() as checkpoint:
        return {
            n: (e.dtype, e.shape, e.attributes, checkpoint.read(n).tobytes()) for n, e in checkpoint.tensors.items()
        }


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory):
    """By block: a state of ordinary arrays after a step, saved, and the update of the next step."""
    made = {}
    for block in (ELEMENTS, TILES):
        tx, path = transform(block), tmp_path_factory.mktemp("run")
        step = jax.jit(tx.update)
        _, state = step(tree(1), tx.init(jax.tree.map(jnp.asarray, tree(0))))
        with rj.Checkpointer(path) as checkpointer:
            checkpointer.save(1, {"opt": state})
        made[block] = path, step(tree(2), state)[0]
    return made


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout(unsharded, tmp_path, name):
    """What was saved of ordinary arrays is the same state in any layout: the next update has the same bits."""
    block, layout = LAYOUTS[name]
    path, update = unsharded[block]
    tx, params = transform(block), layout(tree(0))
    state = rj.Checkpointer(path).restore({"opt": tx.init(params)})
    with rj.Checkpointer(tmp_path) as again:
        again.save(1, state)
    saved = contents(path)
    assert contents(tmp_path) == saved
    assert {"opt/mu/up/codes", "opt/mu/up/scales", "opt/nu/norm", "opt/nu/none", "opt/count"} < set(saved)
    assert "opt/mu/norm/codes" not in saved
    got = rj.full_params(jax.jit(tx.update)(layout(tree(2)), state["opt"])[0])
    for tensor in SHAPES:
        np.testing.assert_array_equal(got[tensor], update[tensor], err_msg=tensor)


def test_layers_in_a_list_or_stacked(tmp_path):
    """They are the same checkpoint."""
    tx, rng = transform(ELEMENTS), np.random.default_rng(0)
    layers = [{"w": np.zeros((40, 20), np.float32), "b": np.zeros(5, np.float32)} for _ in range(3)]
    stack = {"layers": jax.tree.map(lambda *x: np.stack(x), *layers)}
    listed = tx.init(shard({"layers": layers}, 4, ELEMENTS, units="layers/*"))
    stacked = tx.init(
        rj.shard_tree(stack, make_mesh(3), axis="fsdp", block=ELEMENTS, units="layers", stacked="layers")
    )
    saved = []
    for at, like in enumerate([listed, stacked, listed]):
        if not at:
            state = jax.tree.map(lambda x: jax.device_put(noise(rng, x), x.sharding), like)
        else:
            state = rj.Checkpointer(tmp_path / str(at - 1)).restore(like)
        with rj.Checkpointer(tmp_path / str(at)) as checkpointer:
            checkpointer.save(1, state)
        saved.append(contents(tmp_path / str(at)))
    assert saved[0] == saved[1] == saved[2]
    assert {"mu/layers/1/w/codes", "mu/layers/1/w/scales", "mu/layers/1/b"} < set(saved[0])


def noise(rng, x):
    values = rng.integers(0, 256, x.shape) if x.dtype == jnp.uint8 else rng.normal(size=x.shape)
    return values.astype(x.dtype)


def test_a_reader_without_jax(unsharded):
    """Codes, scales and the map are all that it takes."""
    path, _ = unsharded[ELEMENTS]
    tx = optax.scale_by_adam()
    exact = tx.update(tree(1), tx.init(tree(0)))[1].mu["up"]
    with rj.Checkpointer(path).open() as checkpoint:
        entry = checkpoint.entry("opt/mu/up/codes")
        assert entry.attributes == {"block": "elements(256)", "code_map": "dynamic signed"}
        codes, scales = checkpoint.read("opt/mu/up/codes"), checkpoint.read("opt/mu/up/scales")
    values = code_map("dynamic", signed=True).values[codes]
    moment = values * np.repeat(scales, 256)[: codes.size].reshape(codes.shape)
    np.testing.assert_allclose(moment, exact, atol=0.02 * np.abs(exact).max())


def test_what_is_quantised_otherwise_is_refused(unsharded):
    path, _ = unsharded[ELEMENTS]
    like = {"opt": transform(TILES).init(shard(tree(0), 2, TILES))}
    with pytest.raises(rj.CheckpointError, match=r"opt/mu/up/codes: saved with .*elements\(256\)"):
        rj.Checkpointer(path).restore(like)
    with pytest.raises(rj.CheckpointError, match="no tensor 'opt/mu/up'"):
        rj.Checkpointer(path).restore({"opt": optax.scale_by_adam().init(shard(tree(0), 2, ELEMENTS))})
