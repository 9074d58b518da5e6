"""Muon: sharded equals unsharded, and both equal optax, torch and numpy in matching modes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import assert_close, device_nbytes, make_mesh, make_sharded, poison_padding

import ragged_jax as rj
from ragged_jax.optim import MatrixDims, muon, muon_reference, newton_schulz_reference, routing, scale_by_muon
from ragged_jax.optim._newton_schulz import NewtonSchulz
from ragged_jax.preflight import hlo_report

RNG = np.random.default_rng(0)
SHAPES = {
    "big": (150, 301),
    "conv": {"kernel": (3, 3, 4, 8)},
    "embed": (50, 16),
    "experts": (5, 16, 24),
    "layers": {"norm": (6, 20), "up": (6, 20, 30)},
    "mlp": {"bias": (48,), "kernel": (100, 48)},
    "qkv": (32, 80),
    "square": (64, 64),
    "tall": (301, 40),
}
DIMS = {"qkv": MatrixDims(0, 1, split=(32, 24, 24))}
OPTIONS = {"dims": DIMS, "weight_decay": 0.1, "steps": 3, "adamw_eps": 1e-4}


def normal(shapes, scale=1.0):
    draw = lambda shape: jnp.asarray(scale * RNG.normal(size=shape), jnp.float32)
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


PARAMS, GRADS = normal(SHAPES), [normal(SHAPES), normal(SHAPES)]


def flat(tree):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def two_updates(tx, params, grads):
    state, update = tx.init(params), jax.jit(tx.update)
    for g in grads:
        updates, state = update(g, state, params)
    return updates, state


@pytest.fixture(scope="module")
def unsharded():
    return flat(two_updates(muon(0.1, **OPTIONS), PARAMS, GRADS)[0])


BLOCKS = {"any": None, "rows": rj.rows(8), "tiles": {"tall": rj.tile(8, 8), "big": rj.tile(16, 32)}}


def shard(num_devices, *, packed, block=None, **options):
    plan = rj.plan(
        PARAMS,
        num_devices,
        units="layers",
        stacked="layers",
        min_slab_nbytes=1 << 20 if packed else 0,
        **({"block": block} if block else {}),
        **options,
    )
    return rj.shard_tree(PARAMS, make_mesh(num_devices), axis="fsdp", units="layers", stacked="layers", plan=plan)


@pytest.mark.parametrize(
    ("num_devices", "packed", "block", "options"),
    [
        (2, True, "any", {}),
        (3, False, "any", {"shares": (2, 1, 1)}),
        (4, False, "tiles", {"storage": "auto"}),
        (7, False, "any", {}),
        (8, True, "any", {}),
    ],
)
def test_sharded_equals_unsharded(unsharded, num_devices, packed, block, options):
    """Tall, wide, square, uneven, stacked, conv, expert and fused matrices, and AdamW beside them, padding NaN."""
    with jax.set_mesh(make_mesh(num_devices)), np.errstate(all="ignore"):
        tree = shard(num_devices, packed=packed, block=BLOCKS[block], **options)
        grads = [rj.shard_like(g, tree) for g in GRADS]
        if not options:
            poison = lambda t: t.replace(
                poison_padding(t.unit, t.slabs), {n: poison(child) for n, child in t.children.items()}
            )
            grads = [poison(g) for g in grads]
        updates, state = two_updates(muon(0.1, **OPTIONS), tree, grads)
    assert_close(flat(rj.full_params(updates)), unsharded, rtol=1e-5)
    if num_devices == 2:  # both kinds share slabs
        report = routing(tree, dims=DIMS)
        assert [slab for slab, _, _ in report.shared] == ["slabs/float32x1", "children/layers/slabs/float32x1"]
        assert "mlp/bias" in report.shared[0][2]
        assert report.wasted_nbytes > 0
        assert "label" in str(report)
        zeroed = poison_padding(updates.unit, updates.slabs)["float32x1"]
        assert (np.asarray(updates.slabs["float32x1"])[np.isnan(zeroed)] == 0).all()
    params = {x.shape: x.sharding for x in jax.tree.leaves(tree)}
    assert all(x.sharding == params[x.shape] for x in jax.tree.leaves(state) if x.shape in params and x.ndim)


def test_collectives_and_the_largest_matrix():
    """Two all-to-alls move everything; only the matrix that is too large for one device is multiplied by all."""
    tree = {f"l{i}": jnp.ones((32, 64)) for i in range(8)}
    with jax.set_mesh(make_mesh(4)):
        for extra, expected in (({}, 2), ({"huge": jnp.ones((256, 512))}, None)):
            params = {**tree, **extra}
            sharded = rj.shard_tree(params, make_mesh(4), axis="fsdp", plan=rj.plan(params, 4, min_slab_nbytes=0))
            tx = scale_by_muon(steps=5)
            state = tx.init(sharded)
            compiled = jax.jit(tx.update).lower(sharded, state).compile()
            report = hlo_report(compiled)
            if expected:
                assert report.num_executed == expected
                assert report.collectives["all-to-all"].executed == expected
            else:
                # for the wide matrix: its columns are spread and put back, two norms, and two collectives a step
                assert report.collectives["all-reduce"].executed == 2 + 5
                assert report.collectives["all-gather"].executed == 5


def test_several_exchanges_take_less_memory_and_give_the_same_bits():
    params = {f"l{i}": jnp.asarray(RNG.normal(size=(64, 96)), jnp.float32) for i in range(24)}
    outs, temps, work = [], [], []
    with jax.set_mesh(make_mesh(4)):
        tree = rj.shard_tree(params, make_mesh(4), axis="fsdp", plan=rj.plan(params, 4, min_slab_nbytes=0))
        for nbytes in (None, 4 * 64 * 96):  # of the second, four tensors at a time: one for each device
            tx = scale_by_muon(exchange_nbytes=nbytes)
            state = tx.init(tree)
            compiled = jax.jit(tx.update).lower(tree, state).compile()
            outs.append(rj.full_params(compiled(tree, state)[0]))
            temps.append(compiled.memory_analysis().temp_size_in_bytes)
            work.append(hlo_report(compiled).num_executed)
    assert work == [2, 12]
    own = 24 * 64 * 96 * 4 / 4  # bytes of a device's shards
    assert 3.5 * own < temps[0] < 4.5 * own
    assert temps[1] < 2.1 * own  # gradients mixed with momentum, and results, are there for all matrices
    jax.tree.map(np.testing.assert_array_equal, *outs)


@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_optax(nesterov):
    shapes = {"tall": (40, 24), "wide": (24, 40), "stack": (3, 16, 24)}
    params, grads = normal(shapes), [normal(shapes) for _ in range(3)]
    dims = {"tall": (0, 1), "wide": (0, 1), "stack": (1, 2)}
    dims = {k: optax.contrib.MuonDimensionNumbers(*v) for k, v in dims.items()}
    theirs = optax.contrib.muon(0.1, nesterov=nesterov, weight_decay=0.1, muon_weight_dimension_numbers=dims)
    ours = muon(0.1, nesterov=nesterov, weight_decay=0.1, bias_correction=True, dims=lambda path, shape: dims[path])
    want, _ = two_updates(theirs, params, grads)
    got, _ = two_updates(ours, params, grads)
    assert_close(flat(got), flat(want), rtol=2e-5)


TORCH = np.load(Path(__file__).parent / "data" / "torch_muon.npz")


@pytest.mark.parametrize(
    ("setting", "options", "rtol"),
    [
        ("float32/original/True", {}, 2e-5),
        ("float32/original/False", {"nesterov": False}, 2e-5),
        ("float32/match_rms_adamw/True", {"scale": "match_rms_adamw"}, 2e-5),
    ],
)
def test_equals_torch(setting, options, rtol):
    """A torch weight is (out, in): its transpose is our kernel. The file's script says how it was made."""
    names = ("wide", "tall", "square")
    grads = [{k: TORCH[f"grad/{k}/{step}"].T for k in names} for step in range(3)]
    tx = scale_by_muon(**options)
    state = tx.init(grads[0])
    for step, g in enumerate(grads):
        updates, state = tx.update(g, state)
        assert_close(
            {k: -np.asarray(x).T for k, x in updates.items()},
            {k: TORCH[f"{setting}/update/{k}/{step}"] for k in names},
            rtol,
        )


def test_in_bfloat16_as_close_to_float32_as_torch():
    """Each is 1.4 to 1.7 % from float32; two such errors that have nothing to do with each other are 2.2 % apart."""
    grads = {k: TORCH[f"grad/{k}/0"].T for k in ("wide", "tall", "square")}
    tx = scale_by_muon(compute_dtype="bfloat16")
    updates, _ = tx.update(grads, tx.init(grads))
    for k, x in updates.items():
        theirs, exact = (TORCH[f"{dtype}/original/True/update/{k}/0"] for dtype in ("bfloat16", "float32"))
        away = lambda a, b, exact=exact: np.linalg.norm(a - b) / np.linalg.norm(exact)
        ours = -np.asarray(x).T
        assert away(ours, exact) <= 1.3 * away(theirs, exact)
        assert away(ours, theirs) <= 0.03


@pytest.mark.parametrize("coefficients", ["quintic", "five_rows", "polar_express", (2.0, -1.5, 0.5)])
def test_equals_the_reference(coefficients):
    grads = [RNG.normal(size=(24, 40)) for _ in range(3)]
    for options in ({}, {"bias_correction": True, "scale": "spectral_unclamped"}, {"nesterov": False, "scale": None}):
        tx = scale_by_muon(coefficients=coefficients, **options)
        state = tx.init({"w": jnp.zeros((24, 40))})
        for g, want in zip(grads, muon_reference(grads, coefficients=coefficients, **options), strict=True):
            updates, state = tx.update({"w": jnp.asarray(g, jnp.float32)}, state)
            assert_close({"w": np.asarray(updates["w"])}, {"w": want}, rtol=1e-4)


def test_the_reference_orthogonalises():
    x = RNG.normal(size=(20, 30))
    u, _, v = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(newton_schulz_reference(x, "polar_express", 8), u @ v, atol=1e-6)
    values = np.linalg.svd(newton_schulz_reference(x), compute_uv=False)
    assert 0.5 < values.min() < values.max() < 1.3
    with pytest.raises(ValueError, match="no coefficients called"):
        scale_by_muon(coefficients="cubic")
    with pytest.raises(ValueError, match="no scale"):
        scale_by_muon(scale="large")
    with pytest.raises(ValueError, match="not both"):
        muon(0.02, adamw=optax.sgd(1.0), adamw_learning_rate=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_scale(dtype):
    """Tiny, huge and zero gradients stay finite, and the scale does not matter."""
    x = jnp.asarray(RNG.normal(size=(16, 24)), dtype)
    run = jax.jit(NewtonSchulz(((3.4445, -4.7750, 2.0315),) * 5))
    expected = run(x.astype(jnp.float32))
    scales = [2.0**-100, 2.0**100] if dtype != "float16" else [2.0**-8, 2.0**8]
    for scale in scales:
        np.testing.assert_allclose(
            run(x * jnp.asarray(scale, dtype)), expected, atol=2e-3 if dtype == "float16" else 1e-6
        )
    assert (run(jnp.zeros((4, 4), dtype)) == 0).all()
    assert jnp.isfinite(run(jnp.full((4, 4), 1e-40))).all()
    assert jnp.isfinite(run(jnp.full((4, 4), jnp.finfo(dtype).max))).all()
    updates, _ = scale_by_muon().update({"w": x}, scale_by_muon().init({"w": x}))
    assert updates["w"].dtype == dtype


def test_routes_and_dims():
    shapes = {
        "attn": {"query": {"kernel": (8, 2, 4)}, "out": {"kernel": (2, 4, 8)}},
        "conv1": {"kernel": (3, 3, 4, 8)},
        "lm_head": {"kernel": (8, 50)},
        "gate": (8, 1),
        "mlp": {"up": (8, 16)},
    }
    report = routing(normal(shapes), route={"mlp/*": "adamw"})
    assert [(r.name, r.to, r.matrices) for r in report.routes] == [
        ("attn/out/kernel", "muon", (1, 8, 8)),
        ("attn/query/kernel", "muon", (1, 8, 8)),
        ("conv1/kernel", "muon", (1, 36, 8)),
        ("gate", "adamw", None),
        ("lm_head/kernel", "adamw", None),
        ("mlp/up", "adamw", None),
    ]
    with pytest.raises(ValueError, match="it is no matrix"):
        routing({"b": jnp.ones(3)}, route={"b": "muon"})
    with pytest.raises(ValueError, match="split=3 of 16 outputs"):
        routing({"w": jnp.ones((8, 16))}, dims=MatrixDims(0, 1, split=3))
    with pytest.raises(ValueError, match="names a dim twice"):
        routing({"w": jnp.ones((8, 16))}, dims=MatrixDims(0, 0))


def _sine(x):
    return jnp.sin(100 * x)


@pytest.mark.deep  # the common suite has its like, with smaller models
def test_a_flax_module_and_its_wrappers():
    """One compile, the state as sharded as the model, the same numbers as one device; under the usual wrappers."""
    tx = optax.MultiSteps(
        optax.chain(
            optax.clip(10.0),
            optax.inject_hyperparams(muon, static_args=("steps", "exchange_nbytes"))(
                optax.constant_schedule(0.02), steps=2
            ),
        ),
        2,
    )
    results = []
    for num_devices in (1, 3):
        model, traces = make_sharded(num_devices), []
        with jax.set_mesh(make_mesh(num_devices)):
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

            @nnx.jit(donate_argnums=(0, 1))
            def step(model, optimizer, traces=traces):
                traces.append(1)
                grads = jax.tree.map(_sine, nnx.state(model, nnx.Param))
                optimizer.update(model, grads)

            for _ in range(4):
                step(model, optimizer)
        assert len(traces) == 1
        results.append(
            {
                "/".join(map(str, p)): np.asarray(x.get_raw_value())
                for p, x in nnx.to_flat_state(rj.full_params(model))
            }
        )
        held = device_nbytes(nnx.state(optimizer))
        assert max(held.values()) - min(held.values()) <= 1024
    assert_close(results[1], results[0], rtol=2e-5)


def test_abstract_init():
    tree = shard(4, packed=False)
    tx = muon(0.1, **OPTIONS)
    shapes = jax.eval_shape(tx.init, tree)
    state = tx.init(tree)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_named_sharding_of_ordinary_arrays():
    mesh = make_mesh(4, jax.sharding.AxisType.Auto)
    params = {"w": jnp.asarray(RNG.normal(size=(32, 64)), jnp.float32)}
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    want, _ = two_updates(scale_by_muon(), params, [params])
    got, state = two_updates(scale_by_muon(), jax.device_put(params, place), [jax.device_put(params, place)])
    assert_close(flat(got), flat(want))
    assert state.mu["w"].sharding.is_equivalent_to(place, 2)
