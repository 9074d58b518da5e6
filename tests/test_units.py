"""Which subtrees of a pytree become units: gathered on their own."""

import jax
import jax.numpy as jnp
import pytest

from ragged_jax.fsdp._tree import parse

W = jax.ShapeDtypeStruct((4, 3), jnp.float32)
TREE = {
    "layers": [{"mlp": {"up": W, "down": W}, "norm": W}, {"mlp": {"up": W, "down": W}, "norm": W}],
    "head": {"w": W},
}


@pytest.mark.parametrize(
    ("units", "want"),
    [
        (None, ["root"]),
        ("*", ["root", "layers", "head"]),
        ("layers/*", ["root", "layers/0", "layers/1"]),
        (("layers/*", "layers/*/mlp"), ["root", "layers/0", "layers/0/mlp", "layers/1", "layers/1/mlp"]),
        ("*/mlp", ["root", "layers/0/mlp", "layers/1/mlp"]),
        (lambda path, subtree: "w" in subtree, ["root", "head"]),
    ],
)
def test_units(units, want):
    found = list(parse(TREE, units, None).walk())
    assert sorted(part.name or "root" for part in found) == sorted(want)
    names = [name for part in found for name in part.own]
    assert len(names) == len(set(names)) == 7, "each leaf is in one unit"
