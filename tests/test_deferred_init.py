"""Deferred initialisation: the bits of an eager init on any number of devices, and nothing whole on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from init_memory import measure_apart
from jax.sharding import AxisType, PartitionSpec
from models import Block, OddModel, device_nbytes, flat, make_mesh

import ragged_jax as rj
from ragged_jax.fsdp import Unit, create

init = jax.nn.initializers
WIDTH = 136  # the orthogonal matrix is spread as well


def tensors() -> dict[str, jax.Array]:
    """Every usual distribution, in sizes that are spread (64 KiB and more) and that are not, few of which divide."""
    keys = jax.random.split(jax.random.key(3), 12)
    return {
        "normal": init.normal(0.02)(keys[0], (1601, WIDTH)),  # a product that XLA would merge with sqrt(2)
        "shifted": init.normal(1.0)(keys[1], (WIDTH, 321)) * 3.1 + 1.7,  # a product and a sum that it would fuse
        "truncated": init.truncated_normal(0.02)(keys[2], (WIDTH, WIDTH)),
        "uniform": init.glorot_uniform()(keys[3], (WIDTH, 4 * WIDTH)),
        "orthogonal": init.orthogonal()(keys[4], (WIDTH, WIDTH)),
        "half": init.lecun_normal()(keys[5], (WIDTH, 3 * WIDTH), jnp.bfloat16),
        "bias": init.normal(0.5)(keys[6], (WIDTH,)),
        "constant": jnp.full((WIDTH, WIDTH), 0.3),
        "steps": jnp.arange(7) - 3,
        "negative_zero": -jnp.zeros((5,)),
        "nothing": jnp.zeros((0, 4)),
        "scalar": jnp.array(4.0),
    }


def stack() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(4), 3)
    return jax.vmap(lambda key: {"w": init.variance_scaling(1.0, "fan_in", "normal")(key, (WIDTH, 171))})(keys)


def tree() -> dict:
    return {**tensors(), "layers": stack()}


@pytest.fixture(scope="module")
def eager() -> dict:
    return tree()


def assert_same_bits(got, want) -> None:
    def compare(a, b):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(compare, got, want)


def assert_same_shardings(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding == b.sharding
        assert jax.typeof(a) == jax.typeof(b)


@pytest.mark.parametrize(
    ("num_devices", "axis_type", "block"),
    [
        pytest.param(1, AxisType.Auto, rj.elements(1), marks=pytest.mark.deep),
        pytest.param(2, AxisType.Explicit, rj.rows(1), marks=pytest.mark.deep),
        pytest.param(3, AxisType.Auto, rj.rows(8), marks=pytest.mark.deep),
        pytest.param(5, AxisType.Explicit, rj.elements(1), marks=pytest.mark.deep),
        pytest.param(6, AxisType.Explicit, rj.tile(8, 8), marks=pytest.mark.deep),
        (7, AxisType.Auto, rj.rows(1)),
        (8, AxisType.Explicit, rj.rows(8)),
    ],
)
@pytest.mark.filterwarnings("ignore:these tensors are smaller than one block:UserWarning")
def test_a_pytree_is_born_with_the_bits_of_the_eager_init(num_devices, axis_type, block, eager):
    mesh = make_mesh(num_devices, axis_type)
    options = {"axis": "fsdp", "block": block, "units": "layers", "stacked": "layers"}
    born, sharded = rj.shard_tree(tree, mesh, **options), rj.shard_tree(eager, mesh, **options)
    assert_same_bits(rj.full_params(born), jax.tree.map(np.asarray, eager))
    assert_same_bits(jax.tree.map(np.asarray, born), jax.tree.map(np.asarray, sharded))  # padding, too
    assert_same_shardings(born, sharded)


def test_jit_would_have_other_bits(eager):
    """The tests above can fail."""
    jitted = jax.jit(tree)()
    assert (jitted["normal"] != eager["normal"]).any()
    assert (jitted["shifted"] != eager["shifted"]).any()


@pytest.mark.parametrize(
    ("num_devices", "axis_type", "scan"),
    [pytest.param(7, AxisType.Explicit, False, marks=pytest.mark.deep), (8, AxisType.Auto, True)],
)
def test_a_flax_model(num_devices, axis_type, scan):
    make, mesh = lambda: OddModel(rngs=nnx.Rngs(0), scan=scan), make_mesh(num_devices, axis_type)
    options = {"axis": "fsdp", "units": Block, "stacked": Block if scan else None}
    born, sharded = rj.fully_shard(make, mesh, **options), rj.fully_shard(make(), mesh, **options)
    assert nnx.graphdef(born) == nnx.graphdef(sharded)
    assert_same_bits(flat(rj.full_params(born)), flat(rj.full_params(sharded)))
    assert_same_shardings(nnx.state(born), nnx.state(sharded))
    assert set(device_nbytes(nnx.state(born, nnx.Param)).values()) == {rj.get_layout(born).shard_nbytes}
    assert born.num_calls[...] == 0
    assert born.head.embedding is born.embed.embedding


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.deep)])
def test_a_flax_model_with_labels_and_slices(axis_type):
    class Mlp(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up, self.norm = nnx.Linear(WIDTH, 250, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
            self.down = nnx.Linear(250, WIDTH, rngs=rngs)

    make = lambda: nnx.Dict(layer=Mlp(nnx.Rngs(0)), head=nnx.Param(jnp.arange(131.0)))
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    specs = {"*/up/kernel": (None, "tp"), "*/up/bias": ("tp",), "*/down/kernel": ("tp",)}
    options = {"axis": "fsdp", "units": Mlp, "label": {"*/kernel": "kernels", "*/norm/*": "norms"}}
    options["specs"] = {pattern: PartitionSpec(*spec) for pattern, spec in specs.items()}
    with jax.set_mesh(mesh):
        born, sharded = rj.fully_shard(make, mesh, **options), rj.fully_shard(make(), mesh, **options)
    layout = rj.get_layout(born)
    assert {s.name for s in layout.buckets[1].slabs if s.split_axes} == {
        "layer/up/kernel",
        "kernels.tp.float32x1",
        "tp.float32x1",
    }
    assert layout == rj.get_layout(sharded)
    assert nnx.graphdef(born) == nnx.graphdef(sharded)
    for what in (nnx.Param, rj.labelled("kernels"), rj.labelled("norms")):
        parts = [nnx.state(model, what) for model in (born, sharded)]
        assert jax.tree.leaves(parts[0])
        assert_same_bits(*(jax.tree.map(np.asarray, part) for part in parts))
        assert_same_shardings(*parts)
    assert set(device_nbytes(nnx.state(born, nnx.Param)).values()) == {layout.shard_nbytes}


@pytest.mark.deep
def test_the_mesh_may_be_set():
    mesh = make_mesh(7)
    with jax.set_mesh(mesh):
        born = rj.shard_tree(tensors, mesh, axis="fsdp")
    assert_same_bits(rj.full_params(born), jax.tree.map(np.asarray, tensors()))


@pytest.mark.parametrize("num_devices", [7, 8])
def test_no_device_holds_a_whole_tensor(num_devices):
    """Compiled programs say what they take: a small multiple of a share, on whatever does not divide, too."""

    def make():
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = {"odd": (4001, WIDTH + 1), "even": (1024, 512), "next": (513, 777)}
        return {n: init.normal(0.02)(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}, ()

    layout = rj.plan(jax.eval_shape(make)[0], num_devices).layout
    units = [Unit(bucket, make_mesh(num_devices), ("fsdp",)) for bucket in layout.buckets]
    programs, whole = [], max(t.nbytes for t in layout.tensors)
    slabs, _ = create(make, units, programs.append)
    assert set(device_nbytes(slabs).values()) == {layout.shard_nbytes}
    analyses = [program.memory_analysis() for program in programs]
    assert max(a.output_size_in_bytes for a in analyses) <= layout.shard_nbytes
    assert max(a.temp_size_in_bytes for a in analyses) <= 5 * layout.shard_nbytes
    assert max(a.output_size_in_bytes for a in analyses) < whole / 3


def test_the_process_never_holds_the_model_twice():
    """Peak memory of a process that creates 55 MiB, of which the largest tensor has 31, on 7 virtual devices."""
    sizes = (7, 3, 512)
    born, sharded = (measure_apart(way, *sizes) for way in ("deferred", "replicated"))
    assert born["device"] < 1.01 * born["model"] / 7
    assert born["peak"] < 4 * born["model"]
    assert sharded["peak"] > 6 * sharded["model"]


@pytest.mark.parametrize("shares", [None, (3, 1, 2)])
def test_replicas_of_shards_and_uneven_shares(shares, eager):
    own = {name: eager[name] for name in ("normal", "shifted", "bias")}
    mesh = jax.make_mesh((2, 3), ("replica", "fsdp"), devices=jax.devices()[:6])
    plan = rj.plan(own, 3, block=rj.rows(8), shares=shares)
    options = {"axis": ("replica", "fsdp"), "plan": plan}
    born = rj.shard_tree(lambda: {name: x for name, x in tensors().items() if name in own}, mesh, **options)
    sharded = rj.shard_tree(own, mesh, **options)
    assert_same_bits(jax.tree.map(np.asarray, born), jax.tree.map(np.asarray, sharded))
    assert_same_shardings(born, sharded)
