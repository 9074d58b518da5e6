"""The contracts over kinds of model, dtypes, features and numbers of devices.

What runs always is a selection of the grid in which each pair of values occurs; `deep` runs all of it.
"""

from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_models import DATA, DTYPES, FEATURES, KINDS, Case, is_trained, make, names_of, oracle, values
from flax.training.train_state import TrainState
from models import assert_close, device_nbytes, make_mesh, units_of

import ragged_jax as rj

pytestmark = pytest.mark.filterwarnings("ignore:these tensors are smaller than one block:UserWarning")


def numbers(feature: str) -> tuple[int, ...]:
    return (4, 6, 8) if feature in ("hsdp", "tp") else (1, 2, 3, 4, 5, 6, 7, 8)


GRID = [Case(k, d, f, n) for k, d, f in product(KINDS, DTYPES, FEATURES) for n in numbers(f)]
FEW = {feature: (4, 6) if len(numbers(feature)) == 3 else (3, 5, 7, 8) for feature in FEATURES}


def selection() -> list[Case]:
    """Each kind with each feature once; numbers of devices and dtypes turn from one to the next."""
    cases = []
    for (i, kind), (j, feature) in product(enumerate(KINDS), enumerate(FEATURES)):
        few = FEW[feature]
        cases.append(Case(kind, DTYPES[(i + j // 2) % 2], feature, few[(i + j) % len(few)]))
    return cases


SELECTED = selection()


def test_the_selection_holds_each_pair_of_values():
    facts = lambda case: (case.kind, case.dtype, case.feature, case.num_devices)
    of = lambda cases: {(i, j, facts(c)[i], facts(c)[j]) for c in cases for i, j in combinations(range(4), 2)}
    usual = [c for c in GRID if c.num_devices in FEW[c.feature]]
    assert of(usual) - of(SELECTED) == set()


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in SELECTED else [pytest.mark.deep], id=str(c)) for c in GRID]
)
def test_one_device_and_the_plan(case):
    """Contracts 1 and 2: numbers are those of one device, whatever the padding holds, and bytes those of the plan."""
    losses, grads, params = oracle(case.dtype, case.tied, case.frozen)
    with jax.set_mesh(case.mesh):
        model = make(case)
        held, layout = device_nbytes(model.arrays), rj.get_layout(model.sharded)
        assert held == {d.id: layout.shard_nbytes for d in jax.devices()[: case.num_devices]}
        model.poison()
        got_losses, got_grads, got = model.train()
    rtol = 2e-5 if case.dtype == "float32" else 2e-2
    np.testing.assert_allclose(got_losses, losses, rtol=rtol)
    assert losses[-1] < losses[0]
    assert_close(as_float(got_grads), as_float(grads), rtol)
    assert_close(as_float(got), as_float(params), rtol)
    if case.frozen:
        start = values(case.tied)
        stayed = [name for name in got if not is_trained(name)]
        assert all((got[name] == jnp.asarray(start[name], case.dtype)).all() for name in stayed)


def as_float(named: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x, np.float32) for name, x in named.items()}


FUNCTIONAL = [Case("linen list", "float32", "plain", 7), Case("linen scan", "float32", "hsdp", 6)]
FUNCTIONAL.append(Case("pytree", "float32", "hsdp", 8))


@pytest.mark.parametrize("case", FUNCTIONAL, ids=str)
def test_every_slab_is_reduced_once_and_empty_ones_not_at_all(case):
    """Contract 5: collectives follow from the layout alone, which all ranks share."""
    model = make(case)
    text = str(jax.make_jaxpr(rj.value_and_grad(model.loss))(model.params, DATA[0]))
    slabs = [slab for unit in units_of(model.params) for slab in unit.bucket.slabs]
    assert any(placement.tensor.numel == 0 for slab in slabs for placement in slab.placements)
    assert text.count("reduce_scatter[") == sum(slab.shard_numel > 0 for slab in slabs)


@pytest.mark.parametrize("case", FUNCTIONAL[1:], ids=str)
def test_a_step_compiles_once_donates_all_and_keeps_its_types(case):
    model = make(case)
    grad_fn = rj.value_and_grad(model.loss)

    def train_step(state, tokens):
        loss, grads = grad_fn(state.params, tokens)
        return state.apply_gradients(grads=grads), loss

    with jax.set_mesh(case.mesh):
        state = TrainState.create(apply_fn=None, params=model.params, tx=optax.adamw(3e-3))
        state = state.replace(step=jnp.array(0))
        step = jax.jit(train_step, donate_argnums=0)
        state, _ = step(state, DATA[0])
        types = [(jax.typeof(x), x.sharding) for x in jax.tree.leaves(state)]
        pointers = buffer_pointers(state)
        state, _ = step(state, DATA[1])
        assert [(jax.typeof(x), x.sharding) for x in jax.tree.leaves(state)] == types
        assert buffer_pointers(state) == pointers
        assert step._cache_size() == 1


def buffer_pointers(tree: Any) -> set[int]:
    arrays = [shard.data for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return {x.unsafe_buffer_pointer() for x in arrays if x.size}


@jax.tree_util.register_dataclass
@dataclass
class Dense:
    """As Equinox does it: a module is a pytree with static fields and methods."""

    kernel: Any
    scale: float = field(default=2.0, metadata={"static": True})

    def __call__(self, x):
        return jnp.tanh(x @ self.kernel) * self.scale


@jax.tree_util.register_dataclass
@dataclass
class Network:
    layers: list[Dense]

    def __call__(self, x):
        for layer in self.layers:
            x = (rj.unsharded(Dense.__call__) if isinstance(layer, rj.ShardedTree) else Dense.__call__)(layer, x)
        return x


def test_modules_that_are_pytrees():
    rng = np.random.default_rng(0)
    net = Network([Dense(rng.normal(size=(6, 6)).astype(np.float32)) for _ in range(2)])
    sharded = rj.shard_tree(net, make_mesh(3), axis="fsdp", units="layers/*")
    x = rng.normal(size=(6, 6)).astype(np.float32)

    def loss(net, x):
        return jnp.square(net(x)).mean()

    value, grads = rj.value_and_grad(loss)(sharded, x)
    expected, expected_grads = jax.value_and_grad(loss)(net, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_close(names_of(rj.full_params(grads)), names_of(expected_grads))
    assert sharded.children["layers/0"].scale == 2.0
    with pytest.raises(AttributeError, match=r"layers/0, layers/1.*rj.full_params"):
        _ = sharded.layers
    with pytest.raises(RuntimeError, match=r"unit 'layers/0' was used outside"):
        rj.unsharded(Dense.__call__)(sharded.children["layers/0"], x)


def test_errors_say_where_tensors_are():
    """Contract 7, for those who treat shards as the tree that they came from."""
    tree = rj.shard_tree({"a": {"w": np.ones(8)}, "b": np.ones(4)}, make_mesh(2), axis="fsdp")
    assert "a" in tree
    assert "c" not in tree
    with pytest.raises(RuntimeError, match=r"unit '\(root\)': a/w\. .*rj.full_params"):
        tree["a"]
    with pytest.raises(KeyError, match=r"'c'; .*a/w, b"):
        tree["c"]
    assert not hasattr(tree, "shape")
