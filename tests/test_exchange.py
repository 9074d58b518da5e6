"""Exchange schedules, executed on real data, and the rounds under them against bounds and slow references."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_jax.layout import (
    Bucket,
    Layout,
    Placement,
    Slab,
    TensorSpec,
    rows,
)
from ragged_jax.planner import (
    Exchange,
    Group,
    Matrix,
    Round,
    Transfer,
    assign_owners,
    exchange,
    hardware,
    matrices,
    owner_exchange,
    plan,
    redistribution,
)
from ragged_jax.planner._exchange_rounds import plan_steps, split_steps, static_bound
from ragged_jax.planner._permutes import colour, dissolve, peel
from ragged_jax.planner._traffic import most_messages, most_numel, steps_cost

H100, CPU = hardware("h100"), hardware("cpu")


def execute(plan: Exchange, memories: list[dict], targets: list[dict]) -> None:
    """Runs an exchange as a backend does: pack, one collective of padded messages, unpack.

    Memories and targets map buffers to arrays `[num_copies, numel]` for every device.
    """
    for m in plan.local:
        data = memories[m.sender][m.source][:, m.source_offset : m.source_offset + m.numel]
        targets[m.receiver][m.target][:, m.target_offset : m.target_offset + m.numel] = data
    for r in plan.rounds:
        wire = {}
        for t in r.transfers:
            message = np.full((plan.num_copies, r.numel), np.nan)
            assert t.numel == sum(p.numel for p in t.parts)
            for p in t.parts:
                data = memories[t.sender][p.source][:, p.source_offset : p.source_offset + p.numel]
                message[:, p.offset : p.offset + p.numel] = data
            assert (t.sender, t.receiver) not in wire
            wire[t.sender, t.receiver] = message
        for t in r.transfers:
            for p in t.parts:
                data = wire[t.sender, t.receiver][:, p.offset : p.offset + p.numel]
                targets[t.receiver][p.target][:, p.target_offset : p.target_offset + p.numel] = data


def memory(layout: Layout, num_devices: int, values: dict[str, np.ndarray] | None) -> list[dict]:
    """Every device's slabs, NaN where `values` has nothing. Values are `[layers, numel]`."""
    devices: list[dict] = []
    for k in range(num_devices):
        buffers = {}
        for bucket in layout.buckets:
            for slab in bucket.slabs:
                whole = np.full((bucket.num_copies, layout.num_shards * slab.shard_numel), np.nan)
                for p in slab.placements:
                    if values is not None:
                        whole[:, p.offset : p.stop] = values[p.tensor.name].reshape(bucket.num_copies, -1)
                low = min(k, layout.num_shards) * slab.shard_numel
                buffers[bucket.name, slab.name] = whole[:, low : low + slab.shard_numel]
        devices.append(buffers)
    return devices


def reshaped(devices: list[dict], num_copies: int) -> list[dict]:
    """The same memory, seen with another leading dim, as the exchange wants it."""
    return [{k: a.reshape(num_copies, -1) for k, a in d.items() if a.size % num_copies == 0} for d in devices]


@st.composite
def layout_pairs(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6))
    stack = draw(st.sampled_from([None, 3]))
    pair = []
    for _ in range(2):
        block = rows(draw(st.integers(1, 3)))
        tensors = tuple(
            TensorSpec(f"t{i}", shape, "float32" if i % 3 else "bfloat16", block) for i, shape in enumerate(shapes)
        )
        cut = draw(st.integers(0, len(tensors)))
        groups = [g for g in (Group("a", tensors[:cut], stack), Group("b", tensors[cut:])) if g.tensors]
        if stack:  # a stacked tensor is stacked in both
            cut = len(tensors)
            groups = [Group(draw(st.sampled_from("ab")), tensors, stack)]
        pair.append(plan(groups, draw(st.integers(1, 5)), min_slab_nbytes=draw(st.sampled_from([0, 128]))).layout)
    return tuple(pair)


@given(layout_pairs(), st.booleans(), st.sampled_from([None, 4, 64]), st.sampled_from([H100, CPU]))
def test_redistribution_moves_real_data(pair, uneven, limit, profile):
    source, target = pair
    rng = np.random.default_rng(0)
    layers = {t.name: b.num_copies for b in source.buckets for t in b.tensors}
    values = {t.name: rng.normal(size=(layers[t.name], t.numel)) for t in source.tensors}
    n = max(source.num_shards, target.num_shards)
    before, after = memory(source, n, values), memory(target, n, None)
    exchanges = redistribution(source, target, profile, uneven=uneven, max_message_nbytes=limit)
    assert exchanges == redistribution(source, target, profile, uneven=uneven, max_message_nbytes=limit)
    for e in exchanges:
        ends = [reshaped(m, e.num_copies) for m in (before, after)]
        execute(e, *ends)
        assert e.bound_nbytes <= e.sent_nbytes
        assert e.bound_seconds(profile) <= e.seconds(profile) * (1 + 1e-12)
        if uneven and limit is None:
            assert len(e.rounds) <= 1
            assert e.seconds(profile) == pytest.approx(e.bound_seconds(profile))
        if not uneven:
            assert e.static_bound_seconds(profile) <= e.seconds(profile) * (1 + 1e-12)
    for got, want in zip(after, memory(target, n, values), strict=True):
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])
    for e in exchanges:  # and back, into the same memory
        assert e.reversed().reversed() == e
    again = memory(source, n, None)
    for e in exchanges:
        ends = [reshaped(m, e.num_copies) for m in (after, again)]
        execute(e.reversed(), *ends)
    for got, want in zip(again, before, strict=True):
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])


@given(st.data(), st.integers(1, 5), st.booleans())
def test_owners_get_whole_matrices(data, num_shards, uneven):
    shapes = data.draw(
        st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=5)
    )
    tensors = tuple(TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes))
    stack = data.draw(st.sampled_from([None, 2]))
    layout = plan(
        [Group("a", tensors, stack)], num_shards, min_slab_nbytes=data.draw(st.sampled_from([0, 99]))
    ).layout
    owners = assign_owners(matrices(layout), num_shards, layout=layout, tolerance=10)
    copies = stack or 1
    values = {t.name: np.random.default_rng(0).normal(size=(copies, t.numel)) for t in tensors}
    held = [{k: a.reshape(1, -1) for k, a in d.items()} for d in memory(layout, num_shards, values)]
    owned = [
        {("owned", f"{r}x{c}"): np.full((1, n * r * c), np.nan) for (r, c), n in owners.num_slots.items()}
        for _ in range(num_shards)
    ]
    for e in owner_exchange(layout, owners, H100, uneven=uneven):
        execute(e, held, owned)
    for m, owner, slot in zip(owners.matrices, owners.owners, owners.slots, strict=True):
        if owner >= 0:
            got = owned[owner]["owned", f"{m.rows}x{m.cols}"][0, slot * m.numel : (slot + 1) * m.numel]
            want = values[m.tensor].reshape(-1)[m.index * m.numel : (m.index + 1) * m.numel]
            np.testing.assert_array_equal(got, want)


def test_stacked_to_single_layers():
    """[L, ...] under a scan and the same tensor unstacked are the same elements."""
    stacked = plan([Group("a", (TensorSpec("w", (6, 4)),), 3)], 2).layout
    tensor = TensorSpec("w", (3, 6, 4))
    single = Layout(3, (Bucket("a", (Slab("w", "float32", 1, 24, (Placement(tensor, 0),), sole=True),)),))
    values = {"w": np.arange(72.0)}
    before, after = memory(stacked, 3, {"w": values["w"].reshape(3, 24)}), memory(single, 3, None)
    (e,) = redistribution(stacked, single, H100)
    assert e.num_copies == 1
    execute(e, reshaped(before, 1), reshaped(after, 1))
    np.testing.assert_array_equal(np.concatenate([d["a", "w"][0] for d in after]), values["w"])


@st.composite
def traffics(draw):
    n = draw(st.integers(2, 7))
    kind = draw(st.sampled_from(["sparse", "dense", "like"]))
    sizes = {
        "sparse": st.sampled_from([0, 0, 0, 1, 7, 40]),
        "dense": st.integers(1, 60),
        "like": st.integers(30, 33),
    }
    traffic = {(i, j): draw(sizes[kind]) for i in range(n) for j in range(n) if i != j}
    return n, {pair: numel for pair, numel in traffic.items() if numel}


def check_permutes(steps, traffic):
    total = dict.fromkeys(traffic, 0)
    for step in steps:
        assert step.kind == "permute"
        assert step.numel == max(step.amounts.values())
        for ends in zip(*step.amounts, strict=True):
            assert len(set(ends)) == len(ends)
        for pair, numel in step.amounts.items():
            total[pair] += numel
    assert total == traffic


@given(traffics(), st.booleans())
def test_colouring_needs_only_as_many_rounds_as_the_busiest_device_has_messages(case, nested):
    _, traffic = case
    steps = colour(traffic, nested=nested)
    check_permutes(steps, traffic)
    assert len(steps) == most_messages(traffic)


@given(traffics())
def test_peeling_loses_no_bandwidth(case):
    n, traffic = case
    steps = [step for step, _ in peel(traffic, n)]
    check_permutes(steps, traffic)
    assert sum(step.numel for step in steps) <= most_numel(traffic)


@given(traffics(), st.booleans(), st.sampled_from([0.0, 5.0, 100.0]))
def test_dissolving_never_costs_time(case, nested, latency):
    n, traffic = case
    before = colour(traffic, nested=nested)
    after = dissolve(before, latency)
    check_permutes(after, traffic)
    assert steps_cost(after, n, latency) <= steps_cost(before, n, latency)


@given(traffics(), st.sampled_from([0.0, 0.5, 5.0, 100.0]), st.randoms(use_true_random=False))
def test_planned_steps(case, latency, rng: random.Random):
    n, traffic = case
    steps = plan_steps(traffic, n, latency)
    pairs = rng.sample(sorted(traffic), len(traffic))
    assert plan_steps({pair: traffic[pair] for pair in pairs}, n, latency) == steps
    cost = steps_cost(steps, n, latency)
    assert max(most_numel(traffic), static_bound(traffic, n, latency)) <= cost * (1 + 1e-12)
    alternatives = [colour(traffic, nested=False), [step for step, _ in peel(traffic, n)]]
    if traffic:
        uniform = latency + (n - 1) * max(traffic.values())
        assert cost <= uniform * (1 + 1e-12)
    assert all(cost <= steps_cost(other, n, latency) * (1 + 1e-12) for other in alternatives)
    total = dict.fromkeys(traffic, 0)
    for step in split_steps(steps, n, 3 * n):
        assert max(step.amounts.values()) <= step.numel <= 3 * n
        for pair, numel in step.amounts.items():
            total[pair] += numel
    assert total == traffic


def slow_best(traffic, n, latency):
    """The best schedule of permutes by trying everything, for tiny traffic of small integers."""
    from functools import cache
    from itertools import permutations

    @cache
    def best(rest):
        if not any(rest):
            return 0.0
        found = float("inf")
        for receivers in permutations(range(n)):
            here = [rest[i * n + j] for i, j in enumerate(receivers)]
            for size in {x for x in here if x}:
                left = list(rest)
                for i, j in enumerate(receivers):
                    left[i * n + j] -= min(size, left[i * n + j])
                found = min(found, latency + size + best(tuple(left)))
        return found

    return best(tuple(traffic.get((i, j), 0) for i in range(n) for j in range(n)))


@given(st.lists(st.integers(0, 4), min_size=6, max_size=6), st.sampled_from([0.25, 1.0, 4.0]))
def test_the_bound_against_every_schedule(numels, latency):
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    traffic = {pair: numel for pair, numel in zip(pairs, numels, strict=True) if numel}
    optimum = slow_best(traffic, 3, latency)
    assert static_bound(traffic, 3, latency) <= optimum
    assert steps_cost(plan_steps(traffic, 3, latency), 3, latency) <= optimum * 1.25


def test_like_amounts_take_one_all_to_all_and_a_peak_one_permute_more():
    like = {(i, j): 100 for i in range(8) for j in range(8) if i != j}
    assert [(s.kind, s.numel) for s in plan_steps(like, 8, latency=50)] == [("all_to_all", 100)]
    steps = plan_steps({**like, (2, 5): 900}, 8, latency=50)
    assert sorted((s.kind, s.numel) for s in steps) == [("all_to_all", 100), ("permute", 800)]


def llama_8b(num_shards, *, stacked, packed=False):
    shapes = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096), "norm1": (4096,)}
    shapes |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336), "norm2": (4096,)}
    layers = [""] if stacked else [f"{i}/" for i in range(32)]
    groups = [Group("embed", (TensorSpec("embed", (128256, 4096), "bfloat16"),))]
    for layer in layers:
        tensors = tuple(TensorSpec(layer + name, shape, "bfloat16", rows(32)) for name, shape in shapes.items())
        groups.append(Group("layers/" + layer, tensors, 32 if stacked else None))
    groups.append(Group("head", (TensorSpec("head", (128256, 4096), "bfloat16"),)))
    return plan(groups, num_shards, min_slab_nbytes=1 << 60 if packed else 1 << 16).layout


def ratios(exchanges, profile):
    """Time over the bound, and over the bound for permutes and padded all-to-alls."""
    seconds = sum(e.seconds(profile) for e in exchanges)
    ideal = sum(e.bound_seconds(profile) for e in exchanges)
    return seconds / ideal, seconds / sum(e.static_bound_seconds(profile) for e in exchanges)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", ["h100", "v5p"])
def test_llama_8b_within_five_percent_of_the_bound(name, stacked):
    profile, layout = hardware(name), llama_8b(8, stacked=stacked)
    found = matrices(layout, [t.name for t in layout.tensors if len(t.shape) == 2 and t.shape[0] < 100000])
    owners = assign_owners(found, 8, layout=layout)
    assert ratios(owner_exchange(layout, owners, profile, dtype="float32"), profile)[0] <= 1.01
    for target in (llama_8b(6, stacked=stacked), llama_8b(8, stacked=stacked, packed=True)):
        exchanges = redistribution(layout, target, profile, group_nbytes=math.inf)
        ideal, static = ratios(exchanges, profile)
        assert ideal <= 1.05
        assert static <= 1.03
        assert sum(e.sent_nbytes for e in exchanges) <= 1.01 * sum(e.bound_nbytes for e in exchanges)


def test_padding_can_be_limited():
    source, target = llama_8b(8, stacked=False), llama_8b(6, stacked=False)
    fast = redistribution(source, target, H100)
    lean = redistribution(source, target, H100, max_padding=0.05)
    for a, b in zip(fast, lean, strict=True):
        assert b.sent_nbytes <= 1.05 * b.bound_nbytes
        assert a.seconds(H100) <= b.seconds(H100)


def test_errors():
    layout = plan([Group("a", (TensorSpec("x", (4,)), TensorSpec("y", (3,))))], 2).layout
    other = plan([Group("a", (TensorSpec("x", (5,)), TensorSpec("z", (3,))))], 2).layout
    with pytest.raises(
        ValueError, match=r"(?s)x is float32\[4\] in the source.*y is not in the t.*z is not in the s"
    ):
        redistribution(layout, other, H100)
    with pytest.raises(ValueError, match="two messages at one device"):
        Round("permute", 1, (Transfer(0, 1, 1, ()), Transfer(2, 1, 1, ())))
    with pytest.raises(ValueError, match="must be positive"):
        exchange([[]], [[]], H100, dtype="float32", num_copies=0)
    with pytest.raises(ValueError, match="owners on 3 devices"):
        owner_exchange(layout, assign_owners([Matrix("x", 0, 2, 2)], 3), H100)
    assert redistribution(layout, layout, H100)[0].rounds == ()
    assert exchange([], [], H100, dtype="int8").rounds == ()
