"""What once gave a wrong number without a word, and must now give the right one or an error."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from models import make_mesh

import ragged_jax as rj
from ragged_jax.layout import Bucket, Layout, LayoutError, Placement, Slab, TensorSpec

W = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def sharded(**kwargs):
    return rj.shard_tree({"w": W}, make_mesh(8), axis="fsdp", **kwargs)


def test_a_loss_that_is_reduced_already():
    """Token-weighted losses of padded batches are written so."""
    weights = np.array([1, 2, 3, 4, 5, 6, 7, 0], np.float32)

    def weighted(params, x, w, psum):
        return psum(((x @ params["w"]) ** 2 * w[:, None]).sum()) / psum(w.sum())

    expected = jax.value_and_grad(weighted)({"w": W}, X, weights, lambda s: s)
    total = lambda s: lax.psum(s, "fsdp")
    for function, want in (
        (lambda p, x: lax.pmean(loss(p, x), "fsdp"), jax.value_and_grad(loss)({"w": W}, X)),
        (lambda p, x: weighted(p, x, lax.dynamic_slice(weights, (lax.axis_index("fsdp"),), (1,)), total), expected),
    ):
        value, grads = jax.jit(rj.value_and_grad(function))(sharded(), X)
        np.testing.assert_allclose(value, want[0], rtol=1e-5)
        np.testing.assert_allclose(rj.full_params(grads)["w"], want[1]["w"], rtol=1e-5)


def test_apply_is_not_differentiated_by_its_model():
    with jax.set_mesh(make_mesh(8)), pytest.raises(TypeError, match="use `value_and_grad`"):
        jax.jit(jax.grad(lambda p: rj.apply(loss)(p, X)))(sharded())


def test_shards_of_a_unit_cannot_be_taken_for_its_parameters():
    class Layer(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(512, 512, use_bias=False, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.linear(x)

        @property
        def penalty(self):
            return jnp.sum(self.linear.kernel[...] ** 2)

    class Outer(nnx.Module):
        def __init__(self):
            self.layer = Layer()

        def __call__(self, x):
            return self.layer(x)

    model = rj.fully_shard(Outer(), make_mesh(8), axis="fsdp", units=Layer)
    assert model.layer.linear.kernel.shape == (512, 512)
    x = np.ones((8, 512), np.float32)
    np.testing.assert_allclose(rj.apply(lambda m, x: m(x))(model, x), Outer()(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="layer/linear/kernel is sharded"):
        rj.apply(lambda m, x: m.layer.penalty)(model, x)


def test_paths_that_are_ambiguous():
    params = {"a/b": np.ones(3, np.float32), "a": {"b": np.zeros(3, np.float32)}}
    with pytest.raises(ValueError, match="ambiguous: a/b"):
        rj.shard_tree(params, make_mesh(8), axis="fsdp")


def test_shard_like_wants_the_shapes_of_the_layout():
    with pytest.raises(ValueError, match=r"w: shape \(3, 4\), planned \(4, 3\)"):
        rj.shard_like({"w": W.T}, sharded())
    pair = rj.shard_tree({"v": np.ones(5, np.float32), "w": W}, make_mesh(8), axis="fsdp")
    with pytest.raises(ValueError, match="share a slab, but are"):
        rj.shard_like({"v": np.ones(5, np.float32), "w": W.astype(np.int32)}, pair)


def test_float16_gradients_are_scaled_before_they_are_summed():
    tree = sharded(precision=rj.MixedPrecision("float16"))
    _, grads = jax.jit(rj.value_and_grad(lambda p, x: p["w"].astype(jnp.float32).sum() * 10000))(tree, X)
    np.testing.assert_allclose(rj.full_params(grads)["w"], 10000, rtol=1e-3)  # two neighbours in float16 are 8 apart


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])
def test_gradients_are_rounded_once_to_the_dtype_of_the_shards(shape, num_microbatches):
    """The sum of float16 gradients in float32 is too large for float16, and a third is no number of bfloat16."""
    mesh = jax.make_mesh(shape, ("replica", "fsdp"), devices=jax.devices()[:3])
    params = {"half": np.zeros((), np.float16), "brain": jnp.zeros(64, jnp.bfloat16)}
    precision = rj.MixedPrecision(reduce_dtype="float32")
    tree = rj.shard_tree(params, mesh, axis=("replica", "fsdp"), precision=precision)

    def loss(p, x):
        return p["half"].astype(jnp.float32) * 30000 + (x * p["brain"].astype(jnp.float32)).mean(0).sum()

    x = np.random.default_rng(3).normal(size=(6, 64)).astype(np.float32)
    run = jax.jit(rj.value_and_grad(loss, num_microbatches=num_microbatches, accumulate_dtype="float32"))
    grads = rj.full_params(run(tree, x)[1])
    assert grads["half"] == 30000
    each = x.reshape(3 * num_microbatches, -1, 64).mean(1).astype(jnp.bfloat16)  # what each device adds up
    expected = each.astype(np.float32).mean(0)
    np.testing.assert_array_equal(grads["brain"], expected.astype(jnp.bfloat16))


def test_complex_numbers_keep_their_imaginary_part():
    precision = rj.MixedPrecision("bfloat16", reduce_dtype="float32")
    w = np.exp(1j * np.arange(12)).astype(np.complex64).reshape(4, 3)
    tree = rj.shard_tree({"w": w}, make_mesh(4), axis="fsdp", precision=precision)
    loss = lambda p, x: (jnp.abs(x @ p["w"]) ** 2).mean()
    run = rj.value_and_grad(loss, num_microbatches=2, accumulate_dtype="float32")
    value, grads = jax.jit(run)(tree, X)
    expected, gradient = jax.value_and_grad(loss)({"w": w}, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(rj.full_params(grads)["w"], gradient["w"], rtol=1e-5)


@pytest.mark.parametrize("deferred", [True, False])
def test_no_two_arrays_of_a_model_share_memory(deferred):
    """A donated array is written to: of two in the same memory one is lost, and on CPU the process."""
    memory = np.zeros(64 + 12, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :][:12].view(np.float32)  # such memory jax takes as it is, on CPU

    class Twins(nnx.Module):
        def __init__(self):
            kernel, zeros = jnp.ones((256, 128)) * 2, jnp.zeros(3)
            self.first, self.second = nnx.Param(kernel), nnx.Param(kernel)
            self.mean, self.same_mean, self.count = nnx.BatchStat(zeros), nnx.BatchStat(zeros), nnx.BatchStat(aligned)

    model = rj.fully_shard(Twins if deferred else Twins(), make_mesh(2), axis="fsdp")
    parts = [part.data for leaf in jax.tree.leaves(nnx.state(model)) for part in leaf.addressable_shards]
    assert len(parts) == len({part.unsafe_buffer_pointer() for part in parts}) == 10
    assert aligned.ctypes.data not in [part.unsafe_buffer_pointer() for part in parts]


def test_a_plan_for_variables_of_another_type():
    class Other(nnx.Param):
        pass

    def model(kind):
        made = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
        made.bias = kind(made.bias[...])
        return made

    plan = rj.plan(model(nnx.Param), 8)
    with pytest.raises(ValueError, match="bias: planned"):
        rj.fully_shard(model(Other), make_mesh(8), axis="fsdp", plan=plan)


def test_a_bucket_without_elements():
    tree = rj.shard_tree({"a": np.zeros((0, 3), np.float32)}, make_mesh(8), axis="fsdp")
    value, grads = rj.value_and_grad(lambda p, x: x.mean() + p["a"].sum())(tree, np.ones(8, np.float32))
    assert value == 1
    assert rj.full_params(grads)["a"].shape == (0, 3)


def test_flags_of_a_layer_stay_flags():
    layer = rj.unsharded(lambda w, x, double, *, shift=0.0: (x @ w["w"]) * (2 if double else 1) + shift)
    tree = rj.shard_tree({"l": {"w": W}}, make_mesh(8), axis="fsdp", units="l")
    out = rj.apply(lambda p, x: layer(p["l"], x, True, shift=1.0))(tree, X)
    np.testing.assert_allclose(out, 2 * X @ W + 1, rtol=1e-5)


def document(**changes):
    slab = Slab("s", "float32", 2, 4, (Placement(TensorSpec("a", (8,)), 0),))
    values = json.loads(Layout(2, (Bucket("", (slab,)),)).to_json())
    for path, value in changes.items():
        *parents, last = [int(key) if key.isdigit() else key for key in path.split("__")]
        node = values
        for key in parents:
            node = node[key]
        node[last] = value
    return json.dumps(values)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"buckets__0__slabs__0__placements__0__offset": 2}, "does not fill rows of 4"),
        ({"num_shards": 10**9}, "must be between 1 and"),
        ({"shares": [10**9, 1]}, "must be at most"),
        ({"buckets__0__stack": -3}, "stack is -3"),
        ({"buckets__0__slabs__0__placements__0__tensor__shape": [10**18, 0]}, "more than 64 dims"),
        ({"buckets__0__slabs__0__placements__0__tensor__shape": [1] * 100}, "more than 64 dims"),
    ],
)
def test_layout_files_that_lie(changes, match):
    Layout.from_json(document())
    with pytest.raises(LayoutError, match=match):
        Layout.from_json(document(**changes))


def test_a_layout_file_that_says_a_thing_twice():
    with pytest.raises(LayoutError, match="same key twice"):
        Layout.from_json(document().replace('"num_shards": 2', '"num_shards": 4, "num_shards": 2'))
