"""Name maps: both directions against a loop over elements, every fault named, files from anywhere."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_jax.layout import NameMap, NameMapError

TRANSPOSED = "in out -> out in"


def moved(names: NameMap, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The targets of these sources."""
    targets = {}
    for name, mapped in names.apply({n: x.shape for n, x in arrays.items()}).items():
        out = np.full(mapped.shape, -1, np.int64)
        for link in mapped.links:
            link.put(link.take(arrays[link.source]), out)
        targets[name] = out
    return targets


@st.composite
def schemes(draw):
    """Fine dims with sizes; of each, whether it is a dim or a part of the name, on both sides; groups and orders."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    roles = [draw(st.sampled_from(["dim", "dim", "number", "word"])) for _ in sizes]
    sides = []
    for side in range(2):
        kinds = ["name" if role != "dim" and draw(st.booleans(), label=f"named {side}") else "dim" for role in roles]
        sides.append(kinds)
    for at in range(len(roles)):  # what is a dim on both sides is no placeholder
        if sides[0][at] == sides[1][at] == "dim":
            roles[at] = "dim"
    orders = []
    for kinds in sides:
        dims = draw(st.permutations([at for at, kind in enumerate(kinds) if kind == "dim"]))
        cuts = [draw(st.booleans()) for _ in dims[1:]]
        groups: list[list[int]] = []
        for at, dim in enumerate(dims):
            if at and not cuts[at - 1]:
                groups[-1].append(dim)
            else:
                groups.append([dim])
        orders.append(groups)
    return sizes, roles, sides, orders


@given(schemes(), st.booleans())
def test_against_a_loop_over_elements(scheme, by_json):
    sizes, roles, sides, orders = scheme

    def pattern(side):
        return "/".join([f"side{side}", *(f"{{p{at}}}" for at, kind in enumerate(sides[side]) if kind == "name")])

    def dims(side):
        return " ".join(f"({' '.join(f'p{at}' for at in group)})" for group in orders[side])

    def word(at, value):
        return str(value) if roles[at] == "number" else f"w{sizes[at] - value}"

    choices = {f"p{at}": tuple(word(at, v) for v in range(n)) for at, n in enumerate(sizes) if roles[at] == "word"}
    known = {f"p{at}": n for at, n in enumerate(sizes) if roles[at] != "word"}
    names = NameMap(((pattern(0), pattern(1), f"{dims(0)} -> {dims(1)}"),), choices, known)
    if by_json:
        names = NameMap.from_json(names.to_json())
    assert names.inverse.inverse == names

    def tensors(side):
        shape = [int(np.prod([sizes[at] for at in group])) for group in orders[side]]
        made: dict[str, np.ndarray] = {}
        for value, index in enumerate(itertools.product(*map(range, sizes))):
            steps = (word(at, index[at]) for at, kind in enumerate(sides[side]) if kind == "name")
            place = []
            for group in orders[side]:
                at_dim = 0
                for at in group:
                    at_dim = at_dim * sizes[at] + index[at]
                place.append(at_dim)
            made.setdefault("/".join([f"side{side}", *steps]), np.full(shape, -2, np.int64))[tuple(place)] = value
        return made

    left, right = tensors(0), tensors(1)
    forth, back = moved(names, left), moved(names.inverse, right)
    assert forth.keys() == right.keys()
    assert back.keys() == left.keys()
    assert all(np.array_equal(forth[name], x) for name, x in right.items())
    assert all(np.array_equal(back[name], x) for name, x in left.items())
    for name, mapped in names.apply({n: x.shape for n, x in left.items()}).items():
        order = tuple(reversed(range(len(mapped.shape))))
        out = np.full(right[name].T.shape, -1, np.int64)
        for link in mapped.links:
            link.permuted(mapped.shape, order).put(link.permuted(mapped.shape, order).take(left[link.source]), out)
        assert np.array_equal(out, right[name].T)


BERT = NameMap(
    (
        ("embed", "embeddings.weight"),
        ("layers/{i}/{which}/kernel", "layer.{i}.{which}.weight", TRANSPOSED),
        ("layers/{i}/out/kernel", "layer.{i}.out.weight", "heads features out -> out (heads features)"),
        ("pooler", "pooler"),
    ),
    choices={"which": ("query", "key")},
    aliases={"head": "embed", "head.weight": "embeddings.weight"},
    ignored=("*.position_ids",),
    optional=("pooler",),
)


def bert(layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (9, 4)}
    for i in range(layers):
        shapes |= {f"layers/{i}/{which}/kernel": (4, 6) for which in ("query", "key")}
        shapes[f"layers/{i}/out/kernel"] = (2, 3, 4)
    return shapes


def test_plain_transpositions_say_their_axes():
    back = BERT.inverse.apply({"layer.0.query.weight": (6, 4)}, {"layers/0/query/kernel": (4, 6)})
    assert back["layers/0/query/kernel"].axes == (1, 0)
    forth = BERT.apply(bert(1))
    assert forth["embeddings.weight"].axes == (0, 1)
    assert forth["layer.0.out.weight"].axes is None
    assert forth["layer.0.out.weight"].shape == (4, 6)


def test_ties_ignored_and_optional_names():
    shapes = bert(1)
    theirs = {name: mapped.shape for name, mapped in BERT.apply({**shapes, "head": (9, 4)}).items()}
    assert "head.weight" not in theirs
    assert BERT.tied(theirs) == {"head.weight": "embeddings.weight"}
    both = BERT.inverse.apply({**theirs, "x.position_ids": (1, 5)}, {**shapes, "head": (9, 4)})
    assert both["head"].links == both["embed"].links
    alone = {"head.weight" if name == "embeddings.weight" else name: shape for name, shape in theirs.items()}
    assert BERT.inverse.apply(alone, shapes)["embed"].links[0].source == "head.weight"


def test_the_shapes_that_are_wanted_say_how_a_dim_is_split():
    theirs = {name: mapped.shape for name, mapped in BERT.apply(bert(2)).items()}
    assert {n: m.shape for n, m in BERT.inverse.apply(theirs, bert(2)).items()} == bert(2)
    with pytest.raises(NameMapError, match=r"6 leaves open how large heads and features .*; say so in `sizes`"):
        BERT.inverse.apply(theirs)


def test_everything_that_does_not_fit_is_named_at_once():
    shapes = bert(3)
    del shapes["layers/1/key/kernel"], shapes["embed"]
    shapes |= {"layers/2/out/kernel": (4, 4), "odd": (), "layers/x/query/kernel": (4, 6)}
    with pytest.raises(NameMapError) as caught:
        BERT.apply(shapes)
    assert str(caught.value).splitlines()[1:] == [
        "  odd: extra, no rule speaks of it",
        "  layers/x/query/kernel: extra, no rule speaks of it",
        "  embed: missing",
        "  layers/1/key/kernel: missing",
        "  layers/2/out/kernel: shape (4, 4) has not the 3 dims of `heads features out`",
    ]
    theirs = {name: mapped.shape for name, mapped in BERT.apply(bert(1)).items()}
    theirs |= {"layer.0.key.weight": (6, 5), "pooler": (1,), "layer.7.key.weight": (6, 4)}
    del theirs["layer.0.query.weight"]
    with pytest.raises(NameMapError) as caught:
        BERT.inverse.apply(theirs, {**bert(1), "head": (9, 4), "nothing": ()})
    assert str(caught.value).splitlines()[1:] == [
        "  layers/0/query/kernel: missing, would be layer.0.query.weight",
        "  layers/0/key/kernel: shape (5, 6) from layer.0.key.weight, wanted (4, 6)",
        "  nothing: missing",
        "  layer.7.key.weight: extra, nothing called layers/7/key/kernel is wanted",
    ]


def test_a_fault_of_one_tensor_does_not_hide_another():
    names = NameMap(
        (("a/{i}", "{i}.a", "x y -> y x"), ("a", "a"), ("b/{which}", "b", "x -> which x")), {"which": ("l", "r")}
    )
    with pytest.raises(NameMapError) as caught:
        names.apply({"a/0": (2,), "b/l": (3,)}, {"0.a": (2, 2), "1.a": (2, 2), "a": (), "b": (2, 3)})
    assert str(caught.value).splitlines()[1:] == [
        "  a/0: shape (2,) has not the 2 dims of `x y`",
        "  b/l: 1 of the 2 tensors that make up b",
        "  1.a: missing, would be a/1",
        "  a: missing, would be a",
    ]


def test_two_rules_for_one_name_are_ambiguous():
    twice = NameMap((("a/{i}", "b.{i}"), ("a/0", "c"), ("d", "b.0")))
    with pytest.raises(NameMapError) as caught:
        twice.apply({"a/0": (2,), "d": (2,)})
    assert "a/0: ambiguous, it is a/{i} and a/0" in str(caught.value)
    assert "b.0: ambiguous, made of d and a/0" in str(caught.value)
    tied = NameMap((("a", "b"),), aliases={"c": "a"})
    with pytest.raises(NameMapError, match=r"c: shape \(3,\), but it is tied to a of \(2,\)"):
        tied.apply({"a": (2,), "c": (3,)})


@pytest.mark.parametrize(
    ("fields", "faults"),
    [
        ({"rules": [["a"]]}, ["('a',) is not (source, target) or"]),
        ({"rules": [["a{", "b"]]}, ["'a{' is no name with placeholders"]),
        ({"rules": [["a/{i}", "b"], ["{x-y}", "{x-y}"]]}, ["{i} is on one side only", "{x-y} is no placeholder"]),
        ({"rules": [["a/{i}{j}", "b/{j}/{i}"]]}, ["nothing between them"]),
        ({"rules": [["a", "b", "x y"], ["a", "b", "x -> (x"]]}, ["no '->'", "the parentheses do not match"]),
        ({"rules": [["a", "b", "x x -> x"], ["a", "b", "x -> y"]]}, ["name one twice", "x, y must be a dim on both"]),
        ({"rules": [["a/{i}", "b/{i}", "i x -> x i"]]}, ["{i} is in both names, and so no dim"]),
        ({"rules": [], "choices": {"q": ["a", "a"]}, "sizes": {"h": 0}}, ["different words", "h is 0"]),
        ({"rules": [], "aliases": {"a/{i}": "b"}}, ["both must have the same placeholders"]),
        ({"rules": [["a", 3]], "more": 1}, ["rules[0][1]: Input should be a valid string", "more: Unexpected"]),
        ({"rules": [["a", "b"]], "version": 2}, ["has version 2"]),
    ],
)
def test_unsound_maps_are_refused(fields, faults):
    with pytest.raises(NameMapError) as caught:
        NameMap.from_json(json.dumps({"format": "ragged-names", "version": 1, **fields}))
    for fault in faults:
        assert fault in str(caught.value)


@pytest.mark.parametrize("shape", [(2**40,), (10**7,)])
def test_a_shape_does_not_make_endless_names(shape):
    with pytest.raises(NameMapError, match="would become"):
        NameMap((("a", "b/{i}", "i ->"),)).apply({"a": shape})
    with pytest.raises(NameMapError, match="missing\n  and 999"):
        NameMap((("a/{i}", "b", "-> i"),)).apply({"a/999999999": ()})
