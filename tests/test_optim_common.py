"""What every transform of `ragged_jax.optim` must do: behave as a citizen of optax, on sharded and ordinary arrays.

To add a transform, add it to `TRANSFORMS`: a function from a learning rate to the transform. Compiling is what takes
the time, so one compiled step serves several tests, and wrappers are put around each other.
"""

from functools import cache, partial

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from models import device_nbytes, make_mesh

import ragged_jax as rj

pytestmark = pytest.mark.filterwarnings("ignore:these tensors are smaller than one block:UserWarning")


def lamb(learning_rate):
    """Two transforms of optax, of which the second needs whole tensors."""
    each = optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio())
    return optax.chain(rj.optim.with_tensors(each), optax.scale_by_learning_rate(learning_rate))


TRANSFORMS = {
    "adamw8bit": partial(rj.optim.adamw8bit, min_numel=512),
    "muon": partial(rj.optim.muon, weight_decay=0.1, steps=3),
    "with_tensors": lamb,
}
SHAPES = {"kernel": (64, 128), "other": (65, 16), "bias": (16,), "scale": ()}

every = pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS)


def params(dtype: str = "float32") -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def grads_of(tree, factor=1.0):
    """Of a function with its minimum at zero."""
    return jax.tree.map(lambda x: x * jnp.asarray(factor / 2, x.dtype), tree)


def sharded(axis_type=AxisType.Explicit, num_devices: int = 4) -> rj.ShardedTree:
    mesh = make_mesh(num_devices, axis_type)
    return rj.shard_tree(params(), mesh, axis="fsdp", block=rj.elements(256))


class Steps:
    """Steps of a transform under jit, parameters and state donated, and how often it was traced."""

    def __init__(self, tx):
        self.tx, self.traces = tx, 0

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(tree, state, factor):
            self.traces += 1
            updates, state = tx.update(grads_of(tree, factor), state, tree)
            return optax.apply_updates(tree, updates), state

        self.step = step

    def __call__(self, tree, state=None, count: int = 2, factor: float = 1.0):
        tree, state = jax.tree.map(jnp.copy, (tree, self.tx.init(tree) if state is None else state))
        for _ in range(count):
            tree, state = self.step(tree, state, factor)
        return tree, state


@cache
def plain(make) -> Steps:
    """Of the transform by itself."""
    return Steps(make(0.1))


def types(tree):
    return [jax.typeof(x) for x in jax.tree.leaves(tree)]


@cache
def alone(make) -> dict[str, np.ndarray]:
    """The parameters after two steps of the transform by itself, on ordinary arrays."""
    return jax.tree.map(np.asarray, plain(make)(params())[0])


def assert_as_alone(tree, make) -> None:
    for name, want in alone(make).items():
        np.testing.assert_allclose(np.asarray(tree[name]), want, rtol=1e-5, atol=1e-6, err_msg=name)


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_are_kept_and_it_compiles_once(make, dtype):
    run, tree = plain(make), params(dtype)
    state, before = run.tx.init(tree), run.traces
    after, new = run(tree, state)
    assert types(after) == types(tree)
    assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]
    assert run.traces - before <= 1
    for name, x in after.items():
        assert np.abs(np.asarray(x, np.float32)).sum() < np.abs(np.asarray(tree[name], np.float32)).sum(), name


@every
def test_abstract_parameters(make):
    tx = make(0.1)
    abstract = jax.eval_shape(tx.init, params())
    assert types(tx.init(params())) == [jax.typeof(jnp.zeros(x.shape, x.dtype)) for x in jax.tree.leaves(abstract)]
    assert jax.tree.structure(abstract) == jax.tree.structure(tx.init(params()))


@every
def test_state_is_born_sharded_and_stays_so(make):
    with jax.set_mesh(make_mesh(4, AxisType.Auto)):
        run, tree = Steps(make(0.1)), sharded(AxisType.Auto)
        eager, state = run.tx.init(tree), jax.jit(run.tx.init)(tree)
        assert types(eager) == types(state)
        for x in jax.tree.leaves((eager, state)):
            if x.ndim:
                assert x.addressable_shards[0].data.size * 4 == x.size, x.sharding
        held = device_nbytes(state)
        after, new = run(tree, state)
        assert run.traces == 1
        assert types(new) == types(state)
        assert types(after) == types(tree)
        assert device_nbytes(new) == held
        shardings = [
            (x.sharding, y.sharding, x.ndim) for x, y in zip(*map(jax.tree.leaves, (state, new)), strict=True)
        ]
        assert all(a.is_equivalent_to(b, n) for a, b, n in shardings)
    assert_as_alone(rj.full_params(after), make)


@every
def test_donated_buffers_are_used_again(make):
    run, tree = plain(make), jax.tree.map(jnp.copy, params())
    state = run.tx.init(tree)
    old = [x for x in jax.tree.leaves((tree, state)) if x.size > 1000]
    pointers = {x.unsafe_buffer_pointer() for x in old}
    new = [x for x in jax.tree.leaves(run.step(tree, state, 1.0)) if x.size > 1000]
    assert all(x.is_deleted() for x in old)
    assert {x.unsafe_buffer_pointer() for x in new} == pointers


@every
def test_scan_over_steps(make):
    tx = make(0.1)

    def body(carry, _):
        tree, state = carry
        updates, state = tx.update(grads_of(tree), state, tree)
        return (optax.apply_updates(tree, updates), state), None

    (tree, _), _ = jax.jit(lambda carry: lax.scan(body, carry, length=2))((params(), tx.init(params())))
    assert_as_alone(tree, make)


def injected(make):
    """A function of the learning rate as Optax looks for it."""
    return optax.inject_hyperparams(lambda learning_rate: make(learning_rate))(learning_rate=0.1)


WRAPS = {
    "nested": lambda make: optax.apply_if_finite(
        optax.MultiSteps(optax.chain(optax.clip(1e3), injected(make)), 1).gradient_transformation(), 3
    ),
    "partition, schedule": lambda make: optax.partition(
        {"a": make(optax.constant_schedule(0.1)), "b": make(0.1)},
        {"kernel": "a", "other": "b", "bias": "a", "scale": "b"},
    ),
    "masked": lambda make: optax.chain(
        optax.masked(make(0.1), {"kernel": True, "other": False, "bias": True, "scale": False}),
        optax.masked(make(0.1), {"kernel": False, "other": True, "bias": False, "scale": True}),
    ),
}


@every
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_inside_the_wrappers_of_optax(make, wrap):
    run, state = Steps(wrap(make)), None
    if wrap is WRAPS["nested"]:
        tree, state = run(params(), count=1, factor=jnp.nan)
        jax.tree.map(np.testing.assert_array_equal, tree, params())
    assert_as_alone(run(params(), state)[0], make)
    assert run.traces <= 2  # some of optax's own counters change type in the first step


@every
def test_zero_gradients_leave_zeros(make):
    after, state = plain(make)(jax.tree.map(jnp.zeros_like, params()))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(after))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state))


class Model(nnx.Module):
    def __init__(self):
        self.kernel, self.other, self.bias, self.scale = (nnx.Param(params()[name]) for name in SHAPES)


@every
@pytest.mark.parametrize("fully_sharded", [False, True])
def test_flax_nnx(make, fully_sharded):
    with jax.set_mesh(make_mesh(4)):
        model = Model()
        if fully_sharded:
            rj.fully_shard(model, make_mesh(4), axis="fsdp", block=rj.elements(256))
        optimizer = nnx.Optimizer(model, make(0.1), wrt=nnx.Param)
        traces = []

        @nnx.jit
        def step(model, optimizer):
            traces.append(1)
            optimizer.update(model, grads_of(nnx.state(model, nnx.Param)))

        for _ in range(2):
            step(model, optimizer)
        if fully_sharded:
            assert len(traces) == 1
            for x in jax.tree.leaves(nnx.state(optimizer)):
                assert x.ndim == 0 or x.addressable_shards[0].data.size * 4 == x.size
        state = rj.full_params(model) if fully_sharded else nnx.state(model, nnx.Param)
    assert_as_alone({name: state[name].get_value() for name in SHAPES}, make)


@every
def test_abstract_optimizer(make):
    abstract = nnx.eval_shape(lambda: nnx.Optimizer(Model(), make(0.1), wrt=nnx.Param))
    concrete = nnx.Optimizer(Model(), make(0.1), wrt=nnx.Param)
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(nnx.state(o))] for o in (abstract, concrete)]
    assert shapes[0] == shapes[1]


@every
def test_train_state(make):
    with jax.set_mesh(make_mesh(4)):
        tree, traces = {"model": sharded()}, []  # Flax asks whether a key is in it
        state = flax.training.train_state.TrainState.create(apply_fn=None, params=tree, tx=make(0.1))
        start = types((state.params, state.opt_state))

        @jax.jit
        def step(state):
            traces.append(1)
            return state.apply_gradients(grads=grads_of(state.params))

        for _ in range(2):
            state = step(state)
        assert types((state.params, state.opt_state)) == start
    assert len(traces) <= 2  # Flax's own counter changes type in the first step
    assert_as_alone(rj.full_params(state.params["model"]), make)


@pytest.mark.parametrize(
    ("make", "counts"),
    [(rj.optim.muon, ("steps", "exchange_nbytes")), (rj.optim.adamw8bit, ("min_numel", "chunk"))],
)
def test_their_own_hyperparameters_are_injected(make, counts):
    """With the counts that their docstrings say are none."""
    tree = sharded(AxisType.Auto)
    tx = optax.inject_hyperparams(make, static_args=counts)(learning_rate=optax.constant_schedule(0.1))
    state = tx.init(tree)
    got, _ = jax.jit(tx.update)(tree, state, tree)
    want, _ = jax.jit(make(0.1).update)(tree, make(0.1).init(tree), tree)
    assert float(state.hyperparams["learning_rate"]) == np.float32(0.1)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), got, want)
