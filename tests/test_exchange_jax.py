"""An exchange as a `shard_map` program: the schedule's data is all that a JAX backend needs."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ragged_jax.layout import TensorSpec, rows
from ragged_jax.planner import Group, assign_owners, hardware, matrices, owner_exchange, plan, redistribution

NUM = 8


def program(exchange, sources, targets):
    """A jitted function from the sources to the targets, both one `[NUM, total]` array of buffers end to end.

    `sources` and `targets` map buffers to their offsets. Index tables have a row for each device: where each
    element of a message comes from, and where it goes (`total`, out of range, for padding).
    """

    def tables(numel, moves, total_in, total_out):
        take, put = np.full((NUM, numel), total_in), np.full((NUM, numel), total_out)
        for sender, receiver, slot, m in moves:
            span = np.arange(m.numel)
            take[sender, slot[0] + span] = sources[m.source] + m.source_offset + span
            put[receiver, slot[1] + span] = targets[m.target] + m.target_offset + span
        return jnp.asarray(take), jnp.asarray(put)

    def table(r, total_in, total_out):
        whole = r.kind == "all_to_all"
        moves = []
        for t in r.transfers:
            chunk = (t.receiver * r.numel, t.sender * r.numel) if whole else (0, 0)
            moves += [(t.sender, t.receiver, (chunk[0] + p.offset, chunk[1] + p.offset), p) for p in t.parts]
        return tables(r.numel * (NUM if whole else 1), moves, total_in, total_out)

    def run(total_out, array):
        total_in = array.shape[1]
        first = [0]
        moves = []
        for m in exchange.local:
            moves.append((m.sender, m.receiver, (first[0], first[0]), m))
            first[0] += m.numel
        local = tables(max(1, first[0]), moves, total_in, total_out)
        rounds = [table(r, total_in, total_out) for r in exchange.rounds]
        mesh = jax.make_mesh((NUM,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

        @partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        def body(data, local, rounds):
            out = jnp.zeros((total_out,), data.dtype)
            out = jax.lax.pcast(out, ("d",), to="varying")
            for kind, (take, put) in zip([None, *exchange.rounds], [local, *rounds], strict=True):
                message = data[0].at[take[0]].get(mode="fill", fill_value=0)
                if kind is not None and kind.kind == "permute":
                    message = jax.lax.ppermute(message, "d", kind.pairs)
                elif kind is not None:
                    message = jax.lax.all_to_all(message, "d", 0, 0, tiled=True)
                out = out.at[put[0]].set(message, mode="drop")
            return out[None]

        return jax.jit(body)(array, local, rounds)

    return run


def offsets(layout):
    slabs = [((b.name, s.name), b.num_copies * s.shard_numel) for b in layout.buckets for s in b.slabs]
    ends = np.cumsum([0, *(numel for _, numel in slabs)])
    return {name: int(end) for (name, _), end in zip(slabs, ends, strict=False)}, int(ends[-1])


def contents(layout, values):
    """The array `[NUM, total]` of a layout's slabs."""
    places, total = offsets(layout)
    out = np.zeros((NUM, total), np.float32)
    for b in layout.buckets:
        for s in b.slabs:
            whole = np.zeros(NUM * s.shard_numel, np.float32)
            for p in s.placements:
                whole[p.offset : p.stop] = values[p.tensor.name]
            start = places[b.name, s.name]
            out[:, start : start + s.shard_numel] = whole.reshape(NUM, -1)
    return out


TENSORS = tuple(TensorSpec(f"t{i}", (5 + 3 * i, 4 + i % 3), "float32", rows(1 + i % 2)) for i in range(7))


@pytest.mark.parametrize("latency", [0.0, 1e-8, 1e-4])  # cut messages, whole messages, one all-to-all
def test_redistribution_in_jax(latency):
    profile = dataclasses.replace(hardware("cpu"), latency=latency)
    source = plan([Group("a", TENSORS)], NUM, min_slab_nbytes=0).layout
    target = plan([Group("b", TENSORS[4:]), Group("c", TENSORS[:4])], NUM, min_slab_nbytes=0).layout
    rng = np.random.default_rng(0)
    values = {t.name: rng.normal(size=t.numel).astype(np.float32) for t in TENSORS}
    (exchange,) = redistribution(source, target, profile, group_nbytes=math.inf)
    assert exchange.rounds
    run = program(exchange, offsets(source)[0], offsets(target)[0])
    got = run(offsets(target)[1], jnp.asarray(contents(source, values)))
    np.testing.assert_array_equal(got, contents(target, values))


def test_owner_gather_and_back_in_jax():
    layout = plan([Group("a", TENSORS)], NUM, min_slab_nbytes=0).layout
    owners = assign_owners(matrices(layout), NUM, layout=layout, tolerance=10)
    rng = np.random.default_rng(0)
    values = {t.name: rng.normal(size=t.numel).astype(np.float32) for t in TENSORS}
    before = contents(layout, values)
    (exchange,) = owner_exchange(layout, owners, hardware("cpu"))
    places, total = {}, 0
    for (height, width), count in owners.num_slots.items():
        places["owned", f"{height}x{width}"] = total
        total += count * height * width
    owned = program(exchange, offsets(layout)[0], places)(total, jnp.asarray(before))
    for m, owner, slot in zip(owners.matrices, owners.owners, owners.slots, strict=True):
        start = places["owned", f"{m.rows}x{m.cols}"] + slot * m.numel
        np.testing.assert_array_equal(owned[owner, start : start + m.numel], values[m.tensor])
    back = program(exchange.reversed(), places, offsets(layout)[0])(before.shape[1], owned)
    np.testing.assert_array_equal(back, before)
