"""What a schedule hides its collectives behind: excerpts of GPU and TPU programs, and one compiled here."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from models import Block, OddModel, make_mesh

import ragged_jax as rj
from ragged_jax.planner import step_schedule
from ragged_jax.preflight import hlo_report, overlap_report

# As XLA:GPU writes a layer: two gathers combined in one, one product beside it; a reduction with nothing beside it.
GPU = """HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}

%gemm (p: bf16[8,8], q: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  %q = bf16[8,8]{1,0} parameter(1)
  ROOT %dot = bf16[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (arg: (s32[], bf16[2,8], bf16[1,8], bf16[8,8])) -> (s32[], bf16[2,8], bf16[1,8], bf16[8,8]) {
  %arg = (s32[], bf16[2,8]{1,0}, bf16[1,8]{1,0}, bf16[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %a = bf16[2,8]{1,0} get-tuple-element(%arg), index=1
  %b = bf16[1,8]{1,0} get-tuple-element(%arg), index=2
  %x = bf16[8,8]{1,0} get-tuple-element(%arg), index=3
  %gather = ((bf16[2,8]{1,0}, bf16[1,8]{1,0}), (bf16[8,8]{1,0}, bf16[4,8]{1,0})) all-gather-start(%a, %b), replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(step)/jvp()/while/body/(unshard:layers/all_gather:unshard:layers/all_gather)"}
  %y = bf16[8,8]{1,0} fusion(%x, %x), kind=kCustom, calls=%gemm, backend_config={"kind":"__triton_gemm"}
  %gathered = (bf16[8,8]{1,0}, bf16[4,8]{1,0}) all-gather-done(%gather)
  %w = bf16[8,8]{1,0} get-tuple-element(%gathered), index=0
  %moved = bf16[8,8]{0,1} transpose(%w), dimensions={1,0}, metadata={op_name="jit(step)/jvp()/while/body/unshard:layers/transpose"}
  %z = bf16[8,8]{1,0} custom-call(%y, %w), custom_call_target="__cublas$gemm"
  %scatter = ((bf16[8,8]{1,0}), (bf16[2,8]{1,0})) reduce-scatter-start(%z), replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(step)/transpose(jvp())/while/body/checkpoint/unshard:layers/reduce:layers/reduce_scatter"}
  %scattered = (bf16[2,8]{1,0}) reduce-scatter-done(%scatter)
  ROOT %out = (s32[], bf16[2,8]{1,0}, bf16[1,8]{1,0}, bf16[8,8]{1,0}) tuple(%i, %a, %b, %z)
}

%condition (arg: (s32[], bf16[2,8], bf16[1,8], bf16[8,8])) -> pred[] {
  %arg = (s32[], bf16[2,8]{1,0}, bf16[1,8]{1,0}, bf16[8,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (arg: (s32[], bf16[2,8], bf16[1,8], bf16[8,8])) -> (s32[], bf16[2,8], bf16[1,8], bf16[8,8]) {
  %arg = (s32[], bf16[2,8]{1,0}, bf16[1,8]{1,0}, bf16[8,8]{1,0}) parameter(0)
  ROOT %loop = (s32[], bf16[2,8]{1,0}, bf16[1,8]{1,0}, bf16[8,8]{1,0}) while(%arg), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"15"}}
}
"""  # noqa: E501

# As the TPU compiler writes it: a gather that goes on inside of a product (three parts of one chain), another one on
# the SparseCore, and a reduce-scatter as a fusion; the loop counts to a constant.
TPU = """HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}

%start (p: bf16[2,8]) -> (bf16[2,8], bf16[8,8]) {
  %p = bf16[2,8]{1,0} parameter(0)
  %g0 = bf16[8,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="0"}, metadata={op_name="jit(step)/jvp()/while/body/unshard:layers/all_gather"}
  ROOT %c = (bf16[2,8]{1,0}, bf16[8,8]{1,0}) custom-call(%g0), custom_call_target="AsyncCollectiveStart"
}

%step (p: bf16[2,8], q: bf16[8,8]) -> (bf16[8,8], bf16[8,8]) {
  %p = bf16[2,8]{1,0} parameter(0)
  %q = bf16[8,8]{1,0} parameter(1)
  %conv = bf16[8,8]{1,0} convolution(%q, %q), dim_labels=bf_io->bf
  %g1 = bf16[8,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %t = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) tuple(%conv, %g1)
}

%done (p: bf16[2,8]) -> bf16[8,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  %g2 = bf16[8,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %c = bf16[8,8]{1,0} custom-call(%g2), custom_call_target="AsyncCollectiveDone"
}

%on_sparse_core (p: bf16[2,8]) -> bf16[8,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  ROOT %g3 = bf16[8,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

%all-reduce-scatter (p: bf16[8,8]) -> bf16[2,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  %sum = bf16[8,8]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
  %at = s32[] constant(0)
  ROOT %part = bf16[2,8]{1,0} dynamic-slice(%sum, %at, %at), dynamic_slice_sizes={2,8}
}

%body (arg: (s32[], bf16[2,8], bf16[8,8])) -> (s32[], bf16[2,8], bf16[8,8]) {
  %arg = (s32[], bf16[2,8]{1,0}, bf16[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %a = bf16[2,8]{1,0} get-tuple-element(%arg), index=1
  %x = bf16[8,8]{1,0} get-tuple-element(%arg), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %s = (bf16[2,8]{1,0}, bf16[8,8]{1,0}) fusion(%a), kind=kCustom, calls=%start
  %f = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) fusion(%a, %x), kind=kOutput, calls=%step
  %d = bf16[8,8]{1,0} fusion(%a), kind=kCustom, calls=%done
  %call = ((bf16[2,8]{1,0}), bf16[8,8]{1,0}) call-start(%a), async_execution_thread="sparsecore", to_apply=%on_sparse_core
  %y = bf16[8,8]{1,0} convolution(%d, %x), dim_labels=bf_io->bf
  %z = bf16[8,8]{1,0} convolution(%y, %x), dim_labels=bf_io->bf
  %called = bf16[8,8]{1,0} call-done(%call)
  %r = bf16[2,8]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter
  ROOT %out = (s32[], bf16[2,8]{1,0}, bf16[8,8]{1,0}) tuple(%next, %r, %z)
}

%condition (arg: (s32[], bf16[2,8], bf16[8,8])) -> pred[] {
  %arg = (s32[], bf16[2,8]{1,0}, bf16[8,8]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%arg), index=0
  %end = s32[] constant(32)
  ROOT %lt = pred[] compare(%at, %end), direction=LT
}

ENTRY %main (a: bf16[2,8], x: bf16[8,8]) -> (s32[], bf16[2,8], bf16[8,8]) {
  %a = bf16[2,8]{1,0} parameter(0)
  %x = bf16[8,8]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %init = (s32[], bf16[2,8]{1,0}, bf16[8,8]{1,0}) tuple(%zero, %a, %x)
  ROOT %loop = (s32[], bf16[2,8]{1,0}, bf16[8,8]{1,0}) while(%init), condition=%condition, body=%body
}
"""  # noqa: E501


def test_gpu_gathers_are_combined_and_hidden_and_what_is_not_is_named():
    report = overlap_report(GPU)
    gather, scatter = report.collectives
    assert (gather.kind, gather.unit, gather.executed, gather.nbytes) == ("all-gather", "layers", 15, 128 + 64)
    assert (gather.in_loop, gather.backward, gather.num_arrays) == (True, False, 2)
    assert (gather.num_matmuls, gather.num_matmuls_in_computation) == (1, 2)
    assert (scatter.kind, scatter.unit, scatter.backward, scatter.num_matmuls) == (
        "reduce-scatter",
        "layers",
        True,
        0,
    )
    assert report.exposed_in_loops == (scatter,)
    assert report.unit_moved_nbytes == 15 * 128
    assert report.table().row_count == 2
    assert repr(report) == "OverlapReport(2 collectives, 1 exposed in loops, 1.88 KiB moved for units)"
    assert "reduce-scatter layers backward loop 15 0.00 1 0 of 2 EXPOSED" in " ".join(str(report).split())


def test_a_layer_of_a_list_is_named_by_its_whole_path():
    report = overlap_report(GPU.replace("layers/", "blocks/2/"))
    assert {c.unit for c in report.collectives} == {move.unit for move in report.moves} == {"blocks/2"}


def test_tpu_forms_count_once_each():
    report = overlap_report(TPU)
    found = [(c.kind, c.executed, c.num_matmuls) for c in report.collectives]
    assert found == [("all-gather", 32, 1), ("all-gather", 32, 2), ("reduce-scatter", 32, 0)]
    counts = hlo_report(TPU)
    assert counts.unknown_loops == 0
    assert {kind: (c.static, c.executed) for kind, c in counts.collectives.items()} == {
        "all-gather": (2, 64),
        "reduce-scatter": (1, 32),
    }
    assert counts.collectives["reduce-scatter"].wire_nbytes == 32 * 128 * 3 // 4


def test_a_loop_that_does_not_count_by_one_has_no_known_length():
    assert hlo_report(TPU.replace("%one = s32[] constant(1)", "%one = s32[] constant(2)")).unknown_loops == 1


def test_what_nothing_waits_for_hides_behind_nothing():
    """Only what is taken elsewhere goes on beyond the last instruction; updates lie between a start and its done."""
    gather, *_ = overlap_report(GPU.replace("all-gather-done(%gather)", "all-gather-done(%b)")).collectives
    assert gather.exposed
    update = "%more = bf16[8,8]{1,0} async-update(%gather)\n  %gathered"
    text = GPU.replace("%gathered", update, 1).replace("all-gather-done(%gather)", "all-gather-done(%more)")
    assert [c.num_matmuls for c in overlap_report(text).collectives] == [1, 0]
    text = text.replace("all-gather-done(%more)", "bitcast(%more)")
    assert [c.num_matmuls for c in overlap_report(text).collectives] == [2, 0]


@pytest.mark.parametrize("read", [hlo_report, overlap_report])
def test_other_forms_are_refused_and_not_counted(read):
    for known, other, message in (
        ("calls=%gemm", "calls=%nowhere", "no form of HLO that is known"),
        ("all-gather-start(%a, %b)", "all-gather-start(%a, %nowhere)", "no form of HLO that is known"),
        ("tuple(%i, %a, %b, %z)", "tuple", "not an instruction of HLO: 'ROOT %out = "),
    ):
        with pytest.raises(ValueError, match=message):
            read(GPU.replace(known, other))
    counted = TPU.replace("%next = s32[] add(%i, %one)", "%next = s32[] constant(1)")
    assert hlo_report(counted).unknown_loops == 1


def test_an_unscheduled_module_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        overlap_report(GPU.replace(", is_scheduled=true", ""))


PARAMS = {
    "layers": {"w": jax.ShapeDtypeStruct((5, 128, 128), "float32"), "b": jax.ShapeDtypeStruct((5, 128), "float32")},
    "head": jax.ShapeDtypeStruct((128, 40), "float32"),
}


@pytest.fixture(scope="module")
def tree():
    return rj.shard_tree(PARAMS, make_mesh(4), axis="fsdp", units="layers", stacked="layers")


def test_a_tree_of_shapes_becomes_a_sharded_tree_of_shapes(tree):
    leaves = jax.tree.leaves(tree)
    assert all(isinstance(x, jax.ShapeDtypeStruct) and "fsdp" in x.sharding.spec for x in leaves)
    (w,) = (x for x in leaves if x.shape == (5, 128, 128))
    assert w.sharding.shard_shape(w.shape) == (5, 32, 128)


def test_shapes_compile_and_the_report_names_the_unit_of_each_gather(tree):
    def loss(params, x):
        step = rj.unsharded(lambda w, x: jnp.tanh(x @ w["w"] + w["b"]))
        x, _ = lax.scan(lambda x, w: (step(w, x), None), x, params["layers"])
        return (x @ params["head"]).mean()

    options = rj.compiler_options(tree, "cpu")
    f = jax.jit(rj.value_and_grad(loss), compiler_options=options)
    report = overlap_report(f.lower(tree, jax.ShapeDtypeStruct((8, 128), "float32")).compile())
    of_layers = [c for c in report.collectives if c.unit == "layers"]
    assert {(c.kind, c.backward, c.executed) for c in of_layers if c.in_loop} == {
        ("all-gather", False, 5),
        ("all-gather", True, 5),
        ("reduce-scatter", True, 5),
    }
    assert all(c.exposed for c in report.collectives)  # XLA:CPU runs nothing beside a collective
    assert any(c.unit == "root" and not c.in_loop for c in report.collectives)


def test_a_module_of_shapes_becomes_a_sharded_module_of_shapes():
    make = lambda: OddModel(rngs=nnx.Rngs(0))
    model = nnx.eval_shape(make)
    model = rj.fully_shard(model, make_mesh(3), axis="fsdp", units=Block)
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    whole = sum(x.size * 4 for x in jax.tree.leaves(nnx.state(nnx.eval_shape(make), nnx.Param)))
    assert whole / 3 <= held <= 1.03 * whole / 3


def test_options_allow_what_the_schedule_allows(tree):
    layer = 4 * 128 * (128 + 1)
    options = rj.compiler_options(tree, "gpu")
    assert options["xla_gpu_enable_pipelined_all_gather"]
    assert options["xla_gpu_all_gather_combine_threshold_bytes"] == layer
    plan = rj.plan(PARAMS, 4, units="layers", stacked="layers")
    half = rj.compiler_options(plan, "gpu", precision=rj.MixedPrecision("bfloat16", reduce_dtype="float32"))
    assert half["xla_gpu_all_gather_combine_threshold_bytes"] == layer // 2
    assert half["xla_gpu_reduce_scatter_combine_threshold_bytes"] == layer // 4  # what each of 4 devices gets of it
    none = rj.compiler_options(plan, "gpu", schedule=step_schedule(6, distance=0, limit=1, num_kept=0))
    assert not none["xla_gpu_enable_pipelined_all_gather"]
    three = rj.compiler_options(plan, "gpu", schedule=step_schedule(6, distance=2, limit=3))
    assert three["xla_gpu_all_gather_combine_threshold_bytes"] == 2 * layer
    two = rj.compiler_options(plan, "gpu", parallel_collectives=2)
    assert two == {**options, "xla_gpu_experimental_parallel_collective_overlap_limit": 2}
    assert all(name.startswith("xla_") for name in rj.compiler_options(plan, "tpu"))
    with pytest.raises(ValueError, match="parallel_collectives=0"):
        rj.compiler_options(plan, "gpu", parallel_collectives=0)
    with pytest.raises(ValueError, match="gpu, tpu, cpu"):
        rj.compiler_options(plan, "quantum")
