"""Reading optimised HLO: compiled programs whose answer is known, and text of other backends."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ragged_jax.preflight import Collective, hlo_report, overlap_report

DEVICES, LAYERS, WIDTH = 4, 5, 64
WHOLE = WIDTH * WIDTH * 4


def report(function, *arguments, specs):
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("x"))
    return hlo_report(jax.jit(mapped).lower(*arguments).compile())


def layer(x, shard):
    return jnp.tanh(x @ lax.all_gather(shard, "x", tiled=True)), None


def test_a_scan_runs_its_gather_once_per_layer():
    weights, x = jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((8, WIDTH))
    found = report(lambda w, x: lax.scan(layer, x, w)[0], weights, x, specs=(P(None, "x"), P("x")))
    assert found.collectives == {"all-gather": Collective(1, LAYERS, LAYERS * WHOLE, LAYERS * WHOLE * 3 // 4)}
    assert found.argument_nbytes == (LAYERS * WHOLE + 8 * WIDTH * 4) // DEVICES
    assert found.moved_nbytes["dynamic-slice"] == LAYERS * WHOLE // DEVICES  # each layer's shard
    assert found.unknown_loops == 0


def test_trip_counts_multiply_in_nested_scans():
    weights, x = jnp.ones((3, LAYERS, WIDTH, WIDTH)), jnp.ones((8, WIDTH))
    found = report(
        lambda w, x: lax.scan(lambda x, w: lax.scan(layer, x, w), x, w)[0],
        weights,
        x,
        specs=(P(None, None, "x"), P("x")),
    )
    gather = found.collectives["all-gather"]
    assert (gather.static, gather.executed, gather.nbytes) == (1, 3 * LAYERS, 3 * LAYERS * WHOLE)


def test_a_conditional_counts_its_most_expensive_branch():
    def function(x):
        def long(x):
            return lax.psum(jnp.sin(lax.psum(jnp.sin(x), "x")), "x") + x

        def short(x):
            return lax.psum(jnp.cos(x), "x") + x

        go = lax.pmax(x.sum(), "x") > 0
        return lax.cond(go, long, short, x)

    found = report(function, jnp.ones((8, WIDTH)), specs=(P("x"),))
    reduce = found.collectives["all-reduce"]
    assert (reduce.static, reduce.executed) == (4, 3)  # one for the predicate
    assert reduce.nbytes == 4 + 2 * 2 * WIDTH * 4


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    def function(x):
        def body(x):
            return jnp.cos(lax.all_gather(x, "x", tiled=True)[:2]) + x

        return lax.while_loop(lambda x: lax.pmax(x.max(), "x") < 9, body, x)

    found = report(function, jnp.ones((8, WIDTH)), specs=(P("x"),))
    assert found.unknown_loops == 1
    assert {kind: c.executed for kind, c in found.collectives.items()} == {"all-gather": 1, "all-reduce": 1}


def test_all_kinds_and_their_bytes():
    def function(x):
        y = lax.psum_scatter(x, "x", tiled=True)
        y = lax.all_to_all(y.reshape(DEVICES, -1), "x", 0, 0)
        return lax.ppermute(y, "x", [(0, 1), (1, 0)])

    found = report(function, jnp.ones((4 * DEVICES, 8)), specs=(P("x"),))
    got = {kind: (c.executed, c.nbytes, c.wire_nbytes) for kind, c in found.collectives.items()}
    assert got == {"reduce-scatter": (1, 128, 96), "all-to-all": (1, 32, 24), "collective-permute": (1, 32, 32)}


def test_pure_moves_are_told_from_arithmetic():
    x = jnp.ones((128, 128))
    moved = hlo_report(jax.jit(lambda x: (x.T, jnp.roll(x, 3, 0))).lower(x).compile())
    assert moved.total_moved_nbytes == 2 * x.nbytes
    fused = hlo_report(jax.jit(lambda x: jnp.sin(x.T)).lower(x).compile())
    assert fused.total_moved_nbytes == 0


ASYNC = """HloModule m, is_scheduled=true

%body (p: (s32[], bf16[4,8], bf16[32,8])) -> (s32[], bf16[4,8], bf16[32,8]) {
  %p = (s32[], bf16[4,8]{1,0:T(8,128)(2,1)}, /*index=2*/bf16[32,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = bf16[4,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %start = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(bf16[4,8]{1,0} %w), replica_groups=[1,8]<=[8], dimensions={0}
  %prefetch-start = (bf16[4,8]{1,0:S(1)}, bf16[4,8]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %prefetch = bf16[4,8]{1,0:S(1)} copy-done(%prefetch-start)
  %done = bf16[32,8]{1,0} all-gather-done(%start)
  %moved = bf16[32,8]{0,1} copy(%done)
  ROOT %t = (s32[], bf16[4,8]{1,0}, bf16[32,8]{1,0}) tuple(%i, %w, %moved)
}

%condition (p: (s32[], bf16[4,8], bf16[32,8])) -> pred[] {
  %p = (s32[], bf16[4,8]{1,0}, bf16[32,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: (s32[], bf16[4,8], bf16[32,8])) -> (s32[], bf16[4,8], bf16[32,8]) {
  %a = (s32[], bf16[4,8]{1,0}, bf16[32,8]{1,0}) parameter(0)
  ROOT %w = (s32[], bf16[4,8]{1,0}, bf16[32,8]{1,0}) while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
}
"""  # noqa: E501


def test_asynchronous_pairs_count_once_and_prefetches_are_no_copies():
    found = hlo_report(ASYNC)
    assert found.collectives == {"all-gather": Collective(1, 7, 7 * 512, 7 * 448)}
    assert found.moved_nbytes == {"copy": 7 * 512}
    assert found.temp_nbytes is None


def squeezed(found) -> list[str]:
    """The lines of a report with one blank where it has several."""
    return [" ".join(line.split()) for line in str(found).splitlines()]


def test_a_report_prints_as_a_table_and_its_repr_is_short():
    found = hlo_report(ASYNC)
    assert repr(found) == "HloReport(7 all-gather, 3.06 KiB sent, 3.50 KiB moved)"
    for line in (
        "all-gather 1 7 3.50 KiB 3.06 KiB",
        "all collectives 1 7 3.50 KiB 3.06 KiB",
        "moved by copy 3.50 KiB",
        "all that is only moved 3.50 KiB",
    ):
        assert line in squeezed(found)
    assert "temporary" not in str(found)  # text says nothing of memory
    compiled = hlo_report(jax.jit(lambda x: x @ x).lower(jnp.ones((256, 256))).compile())
    assert repr(compiled).startswith("HloReport(no collectives, 0 B sent")
    assert "arguments 256.00 KiB" in squeezed(compiled)
    unknown = hlo_report(ASYNC.replace(', backend_config={"known_trip_count":{"n":"7"}}', ""))
    assert "loops of unknown length, counted once 1" in squeezed(unknown)


def test_a_reshape_that_changes_the_tiling_of_a_tpu_is_a_move():
    found = hlo_report("""HloModule m, is_scheduled=true

ENTRY %main (p: bf16[16384]) -> bf16[64,256] {
  %p = bf16[16384]{0:T(1024)(128)(2,1)} parameter(0)
  %free = bf16[8,16,128]{2,0,1:T(8,128)(2,1)} bitcast(%p)
  ROOT %r = bf16[64,256]{1,0:T(8,128)(2,1)} reshape(%p)
}
""")
    assert found.moved_nbytes == {"reshape": 2 * 16384}


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        hlo_report("module @jit_f { }")


@pytest.mark.parametrize("read", [hlo_report, overlap_report])
def test_what_is_not_compiled_is_refused_with_the_way_to_compile_it(read):
    step = jax.jit(lambda x: x + 1)
    for wrong, remedy in (
        (step.lower(1.0), r"got Lowered; call `\.compile\(\)` on it"),
        (nnx.jit(lambda x: x).lower(1.0), r"got Lowered; call `\.compile\(\)` on it"),
        (step, r"got PjitFunction; write `jax\.jit\(f\)\.lower\(\*args\)\.compile\(\)`"),
        (lambda x: x, "got function; write"),
    ):
        with pytest.raises(TypeError, match=remedy):
            read(wrong)
    compiled = nnx.jit(lambda x: x).lower(1.0).compile()
    assert read(compiled).collectives == read(compiled.as_text()).collectives
