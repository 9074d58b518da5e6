"""Ragged shards inside the slices of tensor and expert parallelism: one device's numbers, and no gather over tp."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from models import assert_close, device_nbytes, flat

import ragged_jax as rj
from ragged_jax.fsdp import units_of

WIDTH, HEADS, HIDDEN, EXPERTS, VOCAB, STEPS = 48, 4, 200, 4, 301, 5
SPECS = {
    "*/qkv": PartitionSpec(None, None, "tp"),
    "*/out": PartitionSpec("tp"),
    "*/up": PartitionSpec(None, "tp"),
    "*/up_bias": PartitionSpec("tp"),
    "*/down": PartitionSpec("tp", None),
    "*/experts_up": PartitionSpec("ep", None, "tp"),
    "*/experts_down": PartitionSpec("ep", "tp"),
}


def params(num_layers: int = 1):
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.normal(size=shape) / 10).astype(np.float32)
    layer = lambda: {
        "norm": 1 + normal(WIDTH),
        "qkv": normal(WIDTH, 3, WIDTH),
        "out": normal(WIDTH, WIDTH),
        "up": normal(WIDTH, HIDDEN),
        "up_bias": normal(HIDDEN),
        "down": normal(HIDDEN, WIDTH),
        "router": normal(WIDTH, EXPERTS),
        "experts_up": normal(EXPERTS, WIDTH, 30),
        "experts_down": normal(EXPERTS, 30, WIDTH),
        "shift": normal(5),
    }
    return {"embedding": normal(VOCAB, WIDTH), "layers": [layer() for _ in range(num_layers)]}


def layer_fn(w, x):
    h = x * w["norm"] / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
    q, k, v = (
        y.reshape(*y.shape[:2], HEADS, -1) for y in jnp.moveaxis(jnp.einsum("btd,dce->btce", h, w["qkv"]), 2, 0)
    )
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
    x = x + jax.nn.gelu(x @ w["up"] + w["up_bias"]) @ w["down"]
    gates = jax.nn.softmax(x @ w["router"])
    expert = jax.nn.gelu(jnp.einsum("btd,edf->betf", x, w["experts_up"]))
    y = jnp.einsum("betf,efd->betd", expert, w["experts_down"])
    return x + jnp.einsum("bte,betd->btd", gates, y) * (1 + w["shift"].sum())


def make_loss(wrap=lambda f: f):
    def loss(params, tokens):
        x = params["embedding"][tokens[:, :-1]]
        if isinstance(params["layers"], list):
            for w in params["layers"]:
                x = wrap(layer_fn)(w, x)
        else:
            x, _ = jax.lax.scan(lambda x, w: (wrap(layer_fn)(w, x), None), x, params["layers"])
        logits = x @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


DATA = np.random.default_rng(1).integers(0, VOCAB, (STEPS, 24, 6))
TX = optax.adamw(3e-3, eps=1e-2)


def run(params, grad_fn) -> tuple[list[float], Any, Any, Any]:
    """Losses, parameters, the first gradients and the state after some steps of AdamW."""

    @jax.jit
    def step(params, state, tokens):
        loss, grads = grad_fn(params, tokens)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, grads

    losses, first = [], None
    state: Any = TX.init(params)
    for tokens in DATA:
        params, state, value, grads = step(params, state, tokens)
        losses.append(float(value))
        first = grads if first is None else first
    return losses, params, first, state


@pytest.fixture(scope="module")
def reference():
    return run(params(), jax.value_and_grad(make_loss()))


def named(tree):
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(tree)}


def make_mesh(sizes: dict[str, int], axis_type=AxisType.Auto):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes), devices=devices)


def used(mesh):
    """The specs without the axes that the mesh lacks."""
    keep = lambda spec: PartitionSpec(*(n if n in mesh.shape else None for n in spec))
    return {pattern: keep(spec) for pattern, spec in SPECS.items()}


def poison(tree):
    """NaN wherever no tensor lies, in place."""
    for node, unit in zip([tree, *tree.children.values()], units_of(tree), strict=True):
        for slab in unit.bucket.slabs:
            array = np.array(node.slabs[slab.name])
            keep = np.zeros(slab.shard_numel * unit.num_shards, bool)
            for placement in slab.placements:
                keep[placement.offset : placement.stop] = True
            if not slab.sole:
                array.reshape(-1, keep.size)[:, ~keep] = np.nan
            node.slabs[slab.name] = jax.device_put(array, unit.sharding(slab))


@pytest.mark.parametrize(
    ("sizes", "axis_type"),
    [
        pytest.param({"tp": 2, "fsdp": 2}, AxisType.Auto, marks=pytest.mark.deep),
        ({"fsdp": 3, "tp": 2}, AxisType.Explicit),
        pytest.param({"fsdp": 4, "tp": 2}, AxisType.Auto, marks=pytest.mark.deep),
        ({"replica": 2, "fsdp": 2, "tp": 2}, AxisType.Auto),
        ({"fsdp": 2, "ep": 2, "tp": 2}, AxisType.Explicit),
    ],
    ids=str,
)
def test_training_equals_one_device(reference, sizes, axis_type):
    losses, expected, first, _ = reference
    mesh = make_mesh(sizes, axis_type)
    axis = ("replica", "fsdp") if "replica" in sizes else "fsdp"
    with jax.set_mesh(mesh):
        tree = rj.shard_tree(
            params(), mesh, axis=axis, units="layers/*", block={"*/up": rj.rows(5)}, specs=used(mesh)
        )
        assert set(device_nbytes(tree).values()) == {rj.get_layout(tree).shard_nbytes}
        assert_close(named(rj.full_params(tree)), named(params()), rtol=0)
        poison(tree)
        got, trained, grads, state = run(tree, rj.value_and_grad(make_loss(rj.unsharded)))
        np.testing.assert_allclose(got, losses, rtol=2e-5)
        assert_close(named(rj.full_params(grads)), named(first))
        assert_close(named(rj.full_params(trained)), named(expected))
        again = rj.shard_like(rj.full_params(grads), tree)
        for x, y, z in zip(*(jax.tree.leaves(t) for t in (again, grads, state[0].mu)), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
            assert x.sharding.is_equivalent_to(z.sharding, x.ndim)


def test_layers_in_a_scan():
    mesh = make_mesh({"fsdp": 2, "tp": 2})
    stacked = params(2)
    stacked["layers"] = jax.tree.map(lambda *xs: np.stack(xs), *stacked["layers"])
    specs = {p: PartitionSpec(None, *spec) for p, spec in used(mesh).items()}
    losses, expected, _, _ = run(stacked, jax.value_and_grad(make_loss()))
    with jax.set_mesh(mesh):
        tree = rj.shard_tree(stacked, mesh, axis="fsdp", units="layers", stacked="layers", specs=specs)
        got, trained, _, _ = run(tree, rj.value_and_grad(make_loss(rj.unsharded), num_microbatches=2))
    np.testing.assert_allclose(got, losses, rtol=2e-5)
    assert_close(named(rj.full_params(trained)), named(expected))
    assert rj.get_layout(tree).locate("layers/up").placement.tensor.full_shape == (WIDTH, HIDDEN)
    with pytest.raises(ValueError, match="splits the dim of the layers"):
        rj.shard_tree(
            stacked, mesh, axis="fsdp", units="layers", stacked="layers", specs={"*/up": PartitionSpec("tp")}
        )


def collectives(text: str):
    """(operation, elements of the result, devices of a group's first two members apart)."""
    found = []
    for line in text.splitlines():
        if m := re.search(
            r"= \(?(\w+)\[([\d,]*)\].* (all-gather|reduce-scatter|all-to-all|collective-permute|all-reduce)\(", line
        ):
            numel = int(np.prod([int(n) for n in m[2].split(",") if n])) if m[2] else 1
            found.append((m[3], numel, line))
    return found


def groups_of_line(line: str, num_devices: int) -> list[list[int]]:
    if m := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", m[1])]
    m = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert m, line
    ids = np.arange(num_devices).reshape([int(n) for n in m[3].split(",")])
    if m[4]:
        ids = ids.transpose([int(n) for n in m[4].split(",")])
    return ids.reshape(int(m[1]), int(m[2])).tolist()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weights_and_gradients_are_gathered_over_fsdp_only(axis_type, accumulate):
    """In optimised HLO what is gathered and scattered is 1/tp of the tensor; over tp only activations are summed."""
    d, f, batch = 32, 2048, 8
    mesh = make_mesh({"fsdp": 2, "tp": 2}, axis_type)  # device = 2 * fsdp + tp
    weights = {"up": np.ones((d, f), np.float32), "odd": np.ones((d + 1, f + 2), np.float32)}
    weights["down"] = np.ones((f, d), np.float32)
    specs = {"up": PartitionSpec(None, "tp"), "odd": PartitionSpec(None, "tp"), "down": PartitionSpec("tp")}

    def loss(w, x):
        y = jnp.tanh(x @ w["up"]) @ w["down"]
        return (y**2).mean() + (jnp.pad(y, ((0, 0), (0, 1))) @ w["odd"]).var()

    with jax.set_mesh(mesh):
        tree = rj.shard_tree(weights, mesh, axis="fsdp", specs=specs)
        shardings: dict[str, Any] = {name: x.sharding for name, x in tree.slabs.items()}
        assert shardings["up"].spec == PartitionSpec("fsdp", "tp")
        assert tree.slabs["up"].shape == (d, f)
        assert shardings["down"].spec == PartitionSpec(("tp", "fsdp"), None)
        assert tree.slabs["down"].shape == (f, d)
        (packed,) = set(tree.slabs) - {"up", "down"}
        assert shardings[packed].spec[:2] == ("tp", "fsdp")
        grad_fn = rj.value_and_grad(loss, num_microbatches=2 if accumulate else 1)
        text = jax.jit(grad_fn).lower(tree, np.ones((batch, d), np.float32)).compile().as_text() or ""
    largest = (d + 1) * (f + 2) // 2 + 4
    moved = {"all-gather": [], "reduce-scatter": []}
    for op, numel, line in collectives(text):
        groups = groups_of_line(line, 4)
        over_tp = any(device // 2 == group[0] // 2 for group in groups for device in group[1:])
        if op in moved:
            assert not over_tp, line
            moved[op].append(numel)
        else:
            assert op == "all-reduce", line
            assert numel <= batch * (f + 2), line
    assert max(moved["all-gather"]) <= largest
    assert {d * f // 2} <= set(moved["all-gather"])
    assert {d * f // 4} <= set(moved["reduce-scatter"])
    assert max(moved["reduce-scatter"]) <= largest // 2


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable], ids=["ours", "keep all"])
def test_gathered_slices_are_not_kept_for_backward(policy):
    num, d, f = 3, 32, 2048
    mesh, normal = make_mesh({"fsdp": 2, "tp": 2}), np.random.default_rng(0).normal
    weights = {"layers": {"up": normal(size=(num, d, f)), "down": normal(size=(num, f, d))}}
    specs = {"*/up": PartitionSpec(None, None, "tp"), "*/down": PartitionSpec(None, "tp")}
    layer = rj.unsharded(lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"], policy=policy)

    def loss(params, x):
        return (jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["layers"])[0] ** 2).mean()

    tree = rj.shard_tree(weights, mesh, axis="fsdp", units="layers", stacked="layers", specs=specs)
    text = jax.jit(rj.value_and_grad(loss)).lower(tree, np.ones((8, d), np.float32)).compile().as_text() or ""
    kept = [shape for shape in (f"f32[{num},{d},{f // 2}]", f"f32[{num},{f // 2},{d}]") if shape in text]
    assert bool(kept) == (policy is not None)


def test_the_reading_of_groups_can_see_tp():
    assert groups_of_line("replica_groups=[2,2]<=[4]", 4) == [[0, 1], [2, 3]]
    assert groups_of_line("replica_groups=[2,2]<=[2,2]T(1,0)", 4) == [[0, 2], [1, 3]]
    assert groups_of_line("replica_groups={{0,2},{1,3}}", 4) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("specs", "match"),
    [
        ({"nothing": PartitionSpec("tp")}, "'nothing' matches no tensor"),
        ({"embedding": PartitionSpec("model")}, "names model, no axis of the mesh"),
        ({"embedding": PartitionSpec("tp")}, r"dim 0 does not divide by 2 \(tp\)"),
        ({"embedding": PartitionSpec(None, None, "tp")}, "has more dims"),
    ],
)
def test_specs_that_make_no_sense(specs, match):
    with pytest.raises(ValueError, match=match):
        rj.shard_tree(params(), make_mesh({"fsdp": 2, "tp": 2}), axis="fsdp", specs=specs)


def test_faults_of_meshes():
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=kinds, devices=jax.devices()[:4])
    weights, specs = {"w": np.ones((4, 4), np.float32)}, {"w": PartitionSpec("tp")}
    with pytest.raises(ValueError, match="all Auto or all Explicit"):
        rj.shard_tree(weights, mesh, axis="fsdp", specs=specs)
    tree = rj.shard_tree(weights, make_mesh({"fsdp": 2, "tp": 2}, AxisType.Explicit), axis="fsdp", specs=specs)
    step = jax.jit(rj.value_and_grad(lambda p, x: (x @ p["w"]).sum()))
    with pytest.raises(ValueError, match=r"call `jax\.set_mesh"):
        step(tree, np.ones((4, 4), np.float32))


class Mlp(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        split = lambda *names: nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 512, kernel_init=split(None, "tp"), rngs=rngs)
        self.down = nnx.Linear(512, WIDTH, kernel_init=split("tp", None), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Mlp(rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def nnx_loss(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def train(model, grad_fn):
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        loss, grads = grad_fn(model, tokens)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, tokens)) for tokens in DATA], optimizer


@pytest.mark.parametrize(
    ("num_shards", "axis_type"), [pytest.param(2, AxisType.Auto, marks=pytest.mark.deep), (3, AxisType.Explicit)]
)
def test_flax_modules_say_themselves_how_they_are_split(num_shards, axis_type):
    with jax.set_mesh(make_mesh({"fsdp": 1, "tp": 1})):
        whole = Model(rngs=nnx.Rngs(0))
        losses, _ = train(whole, nnx.value_and_grad(nnx_loss))
    mesh = make_mesh({"fsdp": num_shards, "tp": 2}, axis_type)
    with jax.set_mesh(mesh):
        kwargs = {"axis": "fsdp", "units": Mlp, "block": rj.rows(1)}
        model = rj.fully_shard(Model(rngs=nnx.Rngs(0)), mesh, **kwargs)
        state = nnx.state(model, nnx.Param)
        assert set(device_nbytes(state).values()) == {rj.get_layout(model).shard_nbytes}
        assert {t.name for t in rj.get_layout(model).tensors if t.splits} == {
            f"blocks/{i}/{name}/kernel" for i in range(2) for name in ("up", "down")
        }
        if num_shards == 3:  # born as shards
            again = rj.fully_shard(lambda: Model(rngs=nnx.Rngs(0)), mesh, **kwargs)
            assert_close(flat(rj.full_params(again)), flat(rj.full_params(model)), rtol=0)
        got, optimizer = train(model, rj.value_and_grad(nnx_loss))
        moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim]
        assert set(device_nbytes(moments).values()) == {2 * rj.get_layout(model).shard_nbytes}
    np.testing.assert_allclose(got, losses, rtol=2e-5)
    assert_close(flat(rj.full_params(model)), flat(nnx.state(whole, nnx.Param)))


def test_a_plan_made_before_is_followed():
    mesh, specs = make_mesh({"fsdp": 3, "tp": 2}), {"*up": PartitionSpec(None, "tp"), "*down": PartitionSpec("tp")}
    plan = rj.plan(params(), 3, units="layers/*", specs=specs, axis_sizes={"tp": 2})
    tree = rj.shard_tree(params(), mesh, axis="fsdp", units="layers/*", specs=specs, plan=plan)
    assert rj.get_layout(tree) == plan.layout
    with pytest.raises(ValueError, match="the plan is not for this model"):
        rj.shard_tree(params(), mesh, axis="fsdp", units="layers/*", plan=plan)


def odd_tree(axis_type=AxisType.Auto):
    """Slabs of one tensor split by columns and by rows, and packed ones of split and of whole tensors."""
    rng = np.random.default_rng(0)
    shapes = {"up": (64, 1024), "down": (1024, 64), "odd": (7, 10), "bias": (6,), "other": (3, 5), "big": (64, 301)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    up, down = PartitionSpec(None, "tp"), PartitionSpec("tp")
    mesh = make_mesh({"replica": 2, "fsdp": 2, "tp": 2}, axis_type)
    specs = {"up": up, "down": down, "odd": up, "bias": down}
    return weights, rj.shard_tree(weights, mesh, axis=("replica", "fsdp"), specs=specs, block=rj.elements(256))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.deep)])
def test_what_reads_slabs_by_itself_knows_of_splits(axis_type):
    weights, tree = odd_tree(axis_type)
    full = rj.full_params(tree)
    poison(tree)
    assert all((rj.get(tree, name) == full[name]).all() for name in weights)
    norms = {name: np.linalg.norm(x) for name, x in weights.items()}
    total = np.sqrt(sum(x**2 for x in norms.values()))
    for got in (rj.norms(tree), jax.jit(rj.norms)(tree), rj.optim.tensor_norms(tree)):
        assert got.keys() == norms.keys()
        for name, norm in norms.items():
            np.testing.assert_allclose(got[name], norm, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(rj.optim.global_norm(tree), total, rtol=1e-5)
    tx = rj.optim.clip_by_global_norm(1.0)
    clipped, _ = jax.jit(tx.update)(tree, tx.init(tree))
    np.testing.assert_allclose(rj.full_params(clipped)["odd"], weights["odd"] / total, rtol=1e-5)
    assert rj.find_nonfinite(tree) == []
    bad = {"up": (5, 700), "down": (800, 3), "odd": (6, 9), "bias": (1,), "other": (2, 4)}
    for name, at in bad.items():
        weights[name][at] = np.nan
    found = {f.tensor: f for f in rj.find_nonfinite(rj.shard_like(weights, tree))}
    assert {name: (f.index, f.count) for name, f in found.items()} == {name: (at, 1) for name, at in bad.items()}
    assert {name for name, f in found.items() if dict(f.coordinates)["tp"]} == {"up", "down", "odd"}
    assert all(dict(f.coordinates)["replica"] == 0 for f in found.values())


def test_8_bit_adam_quantises_slices():
    """The bits of the optimizer on each slice alone."""
    weights, tree = odd_tree()
    tx = rj.optim.adamw8bit(1e-2, min_numel=30)

    def run(params):
        state, step = tx.init(params), jax.jit(lambda g, s, p: tx.update(g, s, p))
        _, state = step(params, state, params)
        return step(jax.tree.map(lambda x: x * np.float32(0.3), params), state, params)[0]

    got = rj.full_params(run(tree))
    sliced = {
        n: np.split(weights[n], 2, axis=0 if n in ("down", "bias") else 1) for n in ("up", "down", "odd", "bias")
    }
    sliced |= {name: [weights[name]] for name in ("other", "big")}
    expected = run({name: [np.ascontiguousarray(x) for x in parts] for name, parts in sliced.items()})
    for name, parts in expected.items():
        whole = np.concatenate(parts, axis=0 if name in ("down", "bias") else 1)
        np.testing.assert_array_equal(got[name], whole, err_msg=name)


def test_checkpoints_restore_onto_other_splits(tmp_path):
    """Saved under one split, read as whole tensors, under another split, and without any; and the other way round."""
    normal = np.random.default_rng(0).normal
    shapes = {"up": (64, 102), "down": (102, 64), "odd": (7, 10), "bias": (6,), "wide": (7, 72), "other": (3, 5)}
    weights = {name: normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    layers = {"layers": np.random.default_rng(1).normal(size=(2, 6, 4)).astype(np.float32)}

    def shard(sizes, specs):
        mesh, how = make_mesh(sizes), {"specs": specs, "min_slab_nbytes": 512, "axis_order": "auto"}
        plan = rj.plan(weights, sizes["fsdp"], axis_sizes=sizes, **how)
        stack = {"*layers": PartitionSpec(None, None, "tp")} if "tp" in sizes else {}
        stacked = rj.shard_tree({"s": layers}, mesh, axis="fsdp", units="s", stacked="s", specs=stack)
        return {"w": rj.shard_tree(weights, mesh, axis="fsdp", plan=plan, specs=specs), "l": stacked}

    columns, rows = PartitionSpec(None, "tp"), PartitionSpec("tp")
    states = [
        shard({"fsdp": 3, "tp": 2}, {"up": columns, "down": rows, "odd": columns, "bias": rows, "wide": columns}),
        shard({"fsdp": 2, "tp": 4}, {"up": rows, "down": columns, "wide": columns}),
        shard({"fsdp": 5}, {}),
    ]
    assert rj.get_layout(states[0]["w"]).locate("wide").placement.axis_order == (1, 0)
    for number, state in enumerate(states):
        with rj.Checkpointer(tmp_path / str(number), background=False) as checkpointer:
            checkpointer.save(1, state)
            with checkpointer.open() as saved:
                assert all((saved.read(f"w/{name}") == x).all() for name, x in weights.items())
                assert (saved.read("l/s/1/layers") == layers["layers"][1]).all()
            for like in states:
                again = checkpointer.restore(jax.tree.map(jnp.zeros_like, like))
                for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(like), strict=True):
                    assert x.sharding == y.sharding
                    np.testing.assert_array_equal(x, y)
