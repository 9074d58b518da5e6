"""States on their way to other layouts and devices: bit for bit, along the schedule, in little memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from models import make_mesh, poison_padding

import ragged_jax as rj
from ragged_jax.exchange import _program, _redistribute
from ragged_jax.preflight import hlo_report

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "uint8", "int32", "bool")


def random_tree(rng: np.random.Generator) -> dict:
    """Every dtype, stacked layers, a scalar, an array without elements."""
    tree = {name: random(rng, (int(rng.integers(1, 24)), 4 + 4 * int(rng.integers(0, 3))), name) for name in DTYPES}
    tree["scalar"], tree["none"] = random(rng, (), "float32"), random(rng, (0, 3), "int8")
    tree["layers"] = {"w": random(rng, (3, 12, 5), "float32"), "b": random(rng, (3, 5), "bfloat16")}
    return tree


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bits at all, NaN included."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    size = jnp.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape, size), np.uint8).view(jnp.dtype(dtype)).reshape(shape)


def unstacked(tree: dict) -> dict:
    return {**tree, "layers": [jax.tree.map(lambda x, i=i: x[i], tree["layers"]) for i in range(3)]}


def sharded(tree: dict, num: int, variant: int, stacked: bool) -> rj.ShardedTree:
    units = {"units": "layers", "stacked": "layers"} if stacked else {"units": "layers/*"}
    tree = tree if stacked else unstacked(tree)
    if variant == 0:
        return rj.shard_tree(tree, make_mesh(num), axis="fsdp", **units)
    if variant == 1:
        shares = tuple(1 + k % 3 for k in range(num))
        plan = rj.plan(tree, num, shares=shares, block=rj.rows(3), **units)
        return rj.shard_tree(tree, make_mesh(num), axis="fsdp", plan=plan, **units)
    storage = {2: {"storage": "tiled"}, 3: {"axis_order": "auto"}}[variant]
    mesh = jax.make_mesh((2, -(-num // 2)), ("replica", "fsdp"), devices=jax.devices()[: num + num % 2])
    plan = rj.plan(
        tree, mesh.shape["fsdp"], block=rj.tile(2, 4) if variant == 2 else rj.elements(1), **storage, **units
    )
    return rj.shard_tree(tree, mesh, axis=("replica", "fsdp"), plan=plan, **units)


def ordinary(tree: dict) -> dict:
    mesh = jax.make_mesh((2, 4), ("x", "y"))

    def place(x):
        fits = x.ndim == 2 and x.shape[0] % 2 == 0 and x.shape[1] % 4 == 0
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec("x", "y") if fits else PartitionSpec()))

    return jax.tree.map(place, tree)


def poisoned(tree: rj.ShardedTree) -> rj.ShardedTree:
    children = {name: poisoned(child) for name, child in tree.children.items()}
    if tree.unit.shares:
        return tree
    return tree.replace(poison_padding(tree.unit, tree.slabs), children)


def whole(tree) -> dict:
    full = rj.full_params(tree) if isinstance(tree, rj.ShardedTree) else jax.tree.map(np.asarray, tree)
    if isinstance(full["layers"], list):
        full["layers"] = jax.tree.map(lambda *x: np.stack(x), *full["layers"])
    return full


def bits(tree) -> list[tuple]:
    return [(x.shape, str(x.dtype), np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def simulated(program, leaves, shape, sharding):
    """What the devices do, in numpy, one after the other."""
    devices, g = list(program.mesh.devices.flat), program.granule
    raw = leaves[0].dtype
    pools = []
    for d in devices:
        own = [next((np.asarray(s.data) for s in x.addressable_shards if s.device == d), None) for x in leaves]
        parts = [np.zeros(n, raw) if x is None else x for x, n in zip(own, program.sources, strict=True)]
        pools.append(np.concatenate([x.reshape(-1, g) for x in parts]))

    def copied(runs, k, pool, out):
        ends = [*runs.starts[k][1:], runs.size]
        for start, stop, shift in zip(runs.starts[k], ends, runs.shifts[k], strict=True):
            if start < stop and start + shift < len(pool):
                out[start:stop] = pool[start + shift : stop + shift]
        return out

    size = int(np.prod(program.target)) // g
    outs = [np.zeros((size, g), raw) for _ in devices]
    for at, phase in enumerate(program.phases):
        received = [[pools[k]] if at == 0 else [] for k in range(len(devices))]
        for m in phase.messages:
            empty = np.zeros((m.take.size, g), raw)
            sent = [copied(m.take, k, pools[k], empty.copy()) for k in range(len(devices))]
            for k in range(len(devices)):
                if m.kind == "permute":
                    source = [a for a, b in m.pairs if b == k]
                    received[k].append(sent[source[0]] if source else empty)
                else:
                    received[k].append(np.concatenate([x[k * m.numel : (k + 1) * m.numel] for x in sent]))
        for k, parts in enumerate(received):
            assert not parts or phase.put.pool == sum(map(len, parts))
            copied(phase.put, k, np.concatenate(parts) if parts else np.zeros((0, g), raw), outs[k])
    local = sharding.shard_shape(shape)
    of = {d: out.reshape(local) for d, out in zip(devices, outs, strict=True)}
    arrays = [jax.device_put(of[d], d) for d in sharding.devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


ends = st.tuples(st.integers(1, 8), st.integers(0, 3), st.booleans())


@settings(max_examples=settings().max_examples // 8)
@given(ends, ends, st.sampled_from(["ragged", "from ordinary", "to ordinary"]), st.integers(0, 2**32))
def test_any_layout_to_any_other(source, target, kind, seed):
    """On any number of devices, with every dtype, stacked or in a list; padding is never looked at."""
    tree = random_tree(np.random.default_rng(seed))
    zeros = jax.tree.map(np.zeros_like, tree)
    before = ordinary(tree) if kind == "from ordinary" else poisoned(sharded(tree, *source))
    like = ordinary(zeros) if kind == "to ordinary" else sharded(zeros, *target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_redistribute, "_run", simulated)
        patch.setattr(_program, "_LEAST_NBYTES", 64)
        after = rj.redistribute(before, like)
    assert bits(whole(after)) == bits(tree)
    assert jax.tree.structure(after) == jax.tree.structure(like)
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(like), strict=True):
        assert got.sharding == want.sharding
        assert (got.shape, got.dtype) == (want.shape, want.dtype)


@pytest.fixture
def programs(monkeypatch):
    """The programs that are run."""
    seen, real = [], _redistribute.compiled
    monkeypatch.setattr(_redistribute, "compiled", lambda p: seen.append(p) or real(p))
    return seen


def report(program):
    place = NamedSharding(program.mesh, PartitionSpec(_program.AXIS))
    num = program.mesh.size
    shapes = [jax.ShapeDtypeStruct((num,), "int32", sharding=place)]
    shapes += [jax.ShapeDtypeStruct((num * n, *r), program.dtype, sharding=place) for n, *r in program.sources]
    return hlo_report(_program.compiled(program).lower(*shapes).compile())


@pytest.mark.parametrize(
    ("source", "target"),
    [((3, 1, False), (8, 0, True)), pytest.param((8, 0, False), (4, 2, False), marks=pytest.mark.deep)],
)
def test_on_the_devices(source, target, programs):
    tree = random_tree(np.random.default_rng(0))
    for one_program_more in ("int8", "uint8", "int32"):
        del tree[one_program_more]
    before, like = sharded(tree, *source), sharded(jax.tree.map(np.zeros_like, tree), *target)
    assert bits(whole(rj.redistribute(before, like))) == bits(tree)
    count, run = _program.compiled.cache_info().misses, len(programs)
    again = rj.redistribute(jax.tree.map(jnp.copy, before), like)
    assert bits(whole(again)) == bits(tree)
    assert _program.compiled.cache_info().misses == count
    assert len(programs) == 2 * run > 0
    assert all(_program.compiled(p)._cache_size() == 1 for p in programs)


LARGE = {"w": (320, 720), "b": (320,)}


@pytest.mark.parametrize(("num", "other"), [(4, 6), pytest.param(8, 3, marks=pytest.mark.deep)])
def test_memory_and_bytes(num, other, programs):
    """Beside its arrays a program takes less than a bucket, gathers nothing, and sends what it must."""
    tree = {"layers": [{k: np.ones(shape, np.float32) for k, shape in LARGE.items()} for _ in range(3)]}
    before, like = (rj.shard_tree(tree, make_mesh(n), axis="fsdp", units="layers/*") for n in (num, other))
    after = rj.redistribute(before, like)
    assert bits(rj.full_params(after)) == bits(tree)
    bucket = max(b.shard_nbytes for t in (before, like) for b in rj.get_layout(t).buckets)
    assert len(programs) > len(set(programs))  # the layers are alike: one program for all
    for program in set(programs):
        found, e = report(program), program.exchange
        assert found.temp_nbytes is not None
        assert found.temp_nbytes <= bucket + 8192
        assert not {"all-gather", "all-reduce"} & set(found.collectives)
        if e.bound_nbytes > 8192:
            assert e.bound_nbytes <= e.sent_nbytes <= 1.05 * e.bound_nbytes


def test_replicas_share_the_work():
    """Each replica serves its own devices, although the first could serve all."""
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"))
    tree = {"w": np.arange(64 * 32, dtype=np.float32).reshape(64, 32)}
    before = rj.shard_tree(tree, mesh, axis=("replica", "fsdp"))
    like = rj.shard_tree(tree, mesh, axis=("replica", "fsdp"), block=rj.rows(24))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_redistribute, "_run", lambda p, *args: seen.append(p) or simulated(p, *args))
        after = rj.redistribute(before, like)
    assert bits(rj.full_params(after)) == bits(tree)
    assert {(a // 4, b // 4) for p in seen for a, b in p.exchange.traffic} == {(0, 0), (1, 1)}


def test_tensors_that_other_axes_split(monkeypatch):
    """Each slice moves as a tensor of its own; into other slices they go by way of the host."""
    rng, by_host = np.random.default_rng(0), []
    tree = {n: rng.normal(size=s).astype(np.float32) for n, s in {"up": (64, 102), "odd": (7, 12), "b": (5,)}.items()}
    layers = {"layers": {"w": rng.normal(size=(2, 12, 4)).astype(np.float32)}}
    columns, rows = PartitionSpec(None, "tp"), PartitionSpec("tp")

    def shard(tp: int, specs: dict, /, **sizes: int) -> dict:
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=jax.devices()[: tp * sizes["fsdp"]])
        plan = rj.plan(tree, sizes["fsdp"], axis_sizes=sizes, specs=specs, axis_order="auto", min_slab_nbytes=512)
        stack = {"*w": PartitionSpec(None, "tp")} if tp > 1 else {}
        flat = rj.shard_tree(tree, mesh, axis="fsdp", plan=plan, specs=specs)
        return {
            "flat": flat,
            "stack": rj.shard_tree(layers, mesh, axis="fsdp", units="layers", stacked="layers", specs=stack),
        }

    alike = {"up": columns, "odd": columns}
    states = [
        shard(2, alike, fsdp=3, tp=2),
        shard(2, alike, tp=2, fsdp=4),
        shard(4, {"up": rows, "odd": columns}, fsdp=2, tp=4),
        shard(1, {}, fsdp=5),
    ]
    real = _redistribute.array_by_host
    monkeypatch.setattr(_redistribute, "array_by_host", lambda *args: by_host.append(args[0].name) or real(*args))
    monkeypatch.setattr(_redistribute, "_run", simulated)
    want = [*bits(rj.full_params(states[0]["flat"])), *bits(rj.full_params(states[0]["stack"]))]
    for a, before in enumerate(states):
        for b, like in enumerate(states):
            after = rj.redistribute(before, jax.tree.map(jnp.zeros_like, like))
            assert [*bits(rj.full_params(after["flat"])), *bits(rj.full_params(after["stack"]))] == want
            assert [x.sharding for x in jax.tree.leaves(after)] == [x.sharding for x in jax.tree.leaves(like)]
            assert bool(by_host) == ({a, b} > {2} or {a, b} > {3})
            by_host.clear()
    monkeypatch.undo()
    up = {"up": tree["up"]}
    meshes = [jax.make_mesh((n, 2), ("fsdp", "tp"), devices=jax.devices()[: 2 * n]) for n in (3, 4)]
    before, like = (rj.shard_tree(up, mesh, axis="fsdp", specs={"up": columns}) for mesh in meshes)
    assert bits(rj.full_params(rj.redistribute(before, like))) == bits(up)


def test_donated_arrays_are_freed_as_they_are_used(monkeypatch):
    tree = {"layers": [{"w": np.full((40, 8), float(i), np.float32)} for i in range(3)]}
    before = rj.shard_tree(tree, make_mesh(2), axis="fsdp", units="layers/*")
    like = rj.shard_tree(tree, make_mesh(3), axis="fsdp", units="layers/*")
    arrays, left = jax.tree.leaves(before), []
    real = _redistribute._run
    monkeypatch.setattr(
        _redistribute, "_run", lambda *a: left.append(sum(not x.is_deleted() for x in arrays)) or real(*a)
    )
    after = rj.redistribute(before, like, donate=True)
    assert left == [3, 2, 1]
    assert all(x.is_deleted() for x in arrays)
    twice = {"a": jnp.ones(3), "tree": after}
    same = rj.redistribute({**twice, "b": twice["a"]}, {**twice, "b": twice["a"]}, donate=True)
    assert bits(rj.full_params(same["tree"])) == bits(tree)  # what lies right already is kept
    assert same["a"].sum() == same["b"].sum() == 3
    assert bits(rj.full_params(after)) == bits(tree)


def test_an_array_that_a_state_holds_twice_is_freed_once_and_not_while_it_is_needed():
    """A copy by reference, such as the average of weights before the first step."""
    tree = {"w": np.arange(24.0, dtype=np.float32).reshape(8, 3)}
    first, second = (rj.shard_tree(jax.tree.map(np.zeros_like, tree), make_mesh(n), axis="fsdp") for n in (2, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_redistribute, "_run", simulated)
        for ends in ((first, second), (second, first)):
            before = rj.shard_tree(tree, make_mesh(2), axis="fsdp")
            after = rj.redistribute([before, before], list(ends), donate=True)
            assert [bits(rj.full_params(x)) for x in after] == [bits(tree)] * 2
    there = [jax.device_put(jnp.zeros(5), device) for device in jax.devices()[:2]]
    assert bits(rj.redistribute([jnp.arange(5.0)] * 2, there, donate=True)) == bits([jnp.arange(5.0)] * 2)


def test_no_layer_of_a_stack_is_lost():
    stack = {"layers": {"w": jnp.arange(24.0).reshape(4, 6)}}
    with pytest.raises(ValueError, match="layers/w: 18 of its 24 elements are wanted, the others would be lost"):
        rj.redistribute(stack, {"layers": [{"w": jnp.zeros(6)} for _ in range(3)]})


def optimizer(tx, params, num, **options):
    tree = rj.shard_tree(params, make_mesh(num), axis="fsdp", block=rj.elements(256), **options)
    return {"params": tree, "opt": tx.init(tree)}


@pytest.mark.parametrize("name", ["8 bits", "muon"])
def test_optimizer_state_moves_with_its_parameters(name, tmp_path):
    rng = np.random.default_rng(0)
    params = {
        n: rng.normal(size=s).astype(np.float32) for n, s in {"up": (48, 32), "down": (31, 33), "b": (9,)}.items()
    }
    tx = {"8 bits": partial(rj.optim.adamw8bit, min_numel=512), "muon": rj.optim.muon}[name](1e-3)
    before = optimizer(tx, params, 4)
    before["opt"] = jax.tree.map(lambda x: jax.device_put(random_like(rng, x), x.sharding), before["opt"])
    new = rj.shard_tree(jax.eval_shape(lambda: params), make_mesh(3), axis="fsdp", block=rj.elements(256))
    like = {"params": new, "opt": jax.eval_shape(tx.init, new)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_redistribute, "_run", simulated)
        after = rj.redistribute(before, like)
    assert jax.tree.structure(after) == jax.tree.structure(like)
    states = []
    for folder, state in (("before", before), ("after", after)):
        with rj.Checkpointer(tmp_path / folder) as checkpointer:
            checkpointer.save(1, state)
        with rj.Checkpointer(tmp_path / folder).open() as checkpoint:
            states.append({n: checkpoint.read(n).tobytes() for n in checkpoint})
    assert states[0] == states[1]
    ending = {"8 bits": "mu/up/scales", "muon": "mu/up"}[name]
    assert any(tensor.endswith(ending) for tensor in states[0])


def random_like(rng, x):
    return (rng.integers(0, 200, x.shape) if x.dtype != jnp.float32 else rng.normal(size=x.shape)).astype(x.dtype)


class Small(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(6, 40, rngs=rngs), nnx.Linear(40, 6, rngs=rngs)
        self.tied = self.up
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))


def test_flax_modules():
    """With their optimizer, or alone to another layout."""

    def make(num, seed):
        model = Small(nnx.Rngs(0)) if seed == 0 else nnx.eval_shape(lambda: Small(nnx.Rngs(0)))
        return rj.fully_shard(model, make_mesh(num), axis="fsdp", units=nnx.Linear)

    with jax.set_mesh(make_mesh(2)):
        model = make(2, 0)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    with jax.set_mesh(make_mesh(5)):
        other = make(5, 1)
        abstract = nnx.eval_shape(lambda m: nnx.Optimizer(m, optax.adam(1e-3), wrt=nnx.Param), other)
        like = {"model": other, "opt": abstract}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_redistribute, "_run", simulated)
        after = rj.redistribute({"model": model, "opt": optimizer}, like)
        layout = rj.plan(Small(nnx.Rngs(0)), 3, units=nnx.Linear, block=rj.rows(4)).layout
        alone = rj.redistribute(model, layout, mesh=make_mesh(3))
    want = bits(rj.full_params(model))
    assert bits(rj.full_params(after["model"])) == bits(rj.full_params(alone)) == want
    assert isinstance(after["opt"], nnx.Optimizer)
    assert rj.get_layout(alone) == layout
    assert alone.tied.kernel is alone.up.kernel
    assert alone.calls.get_value().sharding.mesh.shape["fsdp"] == 3


def test_a_layout_of_a_tree():
    tree = {"w": np.arange(60.0, dtype=np.float32).reshape(12, 5), "b": np.ones(5, np.float32)}
    before = rj.shard_tree(tree, make_mesh(4), axis="fsdp")
    layout = rj.plan(tree, 4, block=rj.rows(5)).layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_redistribute, "_run", simulated)
        after = rj.redistribute({"params": before, "step": 3}, layout)
    assert rj.get_layout(after["params"]) == layout
    assert after["step"] == 3
    assert bits(rj.full_params(after["params"])) == bits(tree)
    assert rj.redistribute(before, rj.get_layout(before)).slabs == before.slabs  # as they are
    with pytest.raises(ValueError, match="for 3 shards, the mesh has 4"):
        rj.redistribute(before, rj.plan(tree, 3).layout)
    with pytest.raises(TypeError, match=r"an optimizer's state that knows its layout takes more"):
        rj.redistribute(optimizer(rj.optim.adamw8bit(1e-3), tree, 4), layout)
    with pytest.raises(TypeError, match="no sharded model"):
        rj.redistribute({"w": jnp.ones(3)}, layout)


def test_what_does_not_fit_is_named_at_once(tmp_path):
    state = {"a": jnp.ones((2, 3)), "b": jnp.ones(3), "d": jnp.ones(2), "n": 1}
    like = {"a": jnp.ones((3, 2)), "b": jnp.ones(3, jnp.bfloat16), "c": jnp.ones(4), "n": 2}
    with pytest.raises(ValueError, match="cannot become") as caught:
        rj.redistribute(state, like)
    for line in (
        "a: shape (2, 3), wanted with (3, 2)",
        "b: float32, wanted as bfloat16",
        "c: not in the state",
        "d: not wanted, and would be lost",
    ):
        assert line in str(caught.value)
    params, tx = {"w": np.ones((64, 64), np.float32)}, rj.optim.adamw8bit(1e-3, min_numel=512)
    other = rj.optim.adamw8bit(1e-3, min_numel=512, block=rj.elements(512))
    with pytest.raises(ValueError, match=r"opt/0/mu/w/codes: .*elements\(256\).*elements\(512\)"):
        rj.redistribute(optimizer(tx, params, 2), optimizer(other, params, 4))
    whole_first = rj.optim.with_tensors(optax.scale_by_adam())
    with pytest.raises(ValueError, match="`with_tensors` is its owners'"):
        rj.redistribute(optimizer(whole_first, params, 2), optimizer(whole_first, params, 4))
    with rj.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, optimizer(whole_first, params, 2))
        with pytest.raises(rj.CheckpointError, match=r"(?s)owners', and nothing takes it to others.*call `tx.init`"):
            checkpointer.restore(optimizer(whole_first, params, 4))
    with pytest.raises(TypeError, match="under jit"):
        jax.jit(lambda x: rj.redistribute(x, x))(jnp.ones(3))
