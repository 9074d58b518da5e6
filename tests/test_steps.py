"""Step schedules and their simulator, against a clock that ticks and against what must hold."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_jax.layout import TensorSpec
from ragged_jax.planner import (
    BucketCost,
    Group,
    Op,
    StepSchedule,
    bucket_costs,
    choose_step_schedule,
    hardware,
    plan,
    simulate,
    step_schedule,
)
from ragged_jax.planner._steps import least_kept


@st.composite
def schedules(draw, max_buckets=6):
    n = draw(st.integers(0, max_buckets))
    distance = draw(st.integers(0, 4))
    num_kept = draw(st.integers(min(n, least_kept(distance)), n))
    return step_schedule(n, distance=distance, limit=distance + draw(st.integers(1, 3)), num_kept=num_kept)


@st.composite
def cases(draw, least=0):
    """A schedule and whole-numbered costs of its buckets."""
    schedule = draw(schedules())
    seconds, nbytes = st.integers(least, 5), st.integers(0, 9)
    costs = [
        BucketCost(f"b{i}", *(draw(seconds) for _ in range(4)), *(draw(nbytes) for _ in range(4)))
        for i in range(schedule.num_buckets)
    ]
    return schedule, costs


def tick_by_tick(schedule, costs):
    """The slow, obvious machine: every tick each stream starts what it can, and memory is counted anew.

    Times are whole numbers of at least 1.
    """
    started, ended, now, peak = {}, {}, 0, 0
    queues = {
        computes: [i for i, op in enumerate(schedule.ops) if op.computes == computes] for computes in (True, False)
    }
    while len(ended) < len(schedule.ops):
        for i in started:
            if i not in ended and now == started[i] + costs[schedule.ops[i].bucket].seconds(schedule.ops[i].action):
                ended[i] = now
        for queue in queues.values():
            if (
                queue
                and all(i in ended for i in started if i in queue)
                and set(schedule.ops[queue[0]].after) <= set(ended)
            ):
                head = queue[0]
                busy = [
                    i for i in started if i not in ended and schedule.ops[i].computes == schedule.ops[head].computes
                ]
                if not busy:
                    started[queue.pop(0)] = now
        peak = max(peak, memory_in_use(schedule, costs, started, ended))
        now += 1
    return now - 1, peak, [(started[i], ended[i]) for i in range(len(schedule.ops))]


def memory_in_use(schedule, costs, started, ended):
    total = 0
    for bucket, cost in enumerate(costs):
        mine = {i: op.action for i, op in enumerate(schedule.ops) if op.bucket == bucket}
        state = {
            action: [i for i in mine if mine[i] == action] for action in ("unshard", "forward", "backward", "reduce")
        }
        (forward,), (backward,), (reduce,) = state["forward"], state["backward"], state["reduce"]
        uses = [[forward], [backward]] if len(state["unshard"]) == 2 else [[forward, backward]]
        for gather, users in zip(state["unshard"], uses, strict=True):
            if gather in started and not all(u in ended for u in users):
                total += cost.unshard_nbytes
        if backward in started and reduce not in ended:
            total += cost.grad_nbytes
        if forward in started and backward not in ended:
            total += cost.kept_nbytes
        total += cost.workspace_nbytes * sum(i in started and i not in ended for i in (forward, backward))
    return total


@given(cases(least=1))
def test_the_simulator_against_the_ticking_clock(case):
    schedule, costs = case
    report = simulate(schedule, costs, resident_nbytes=7)
    seconds, peak, spans = tick_by_tick(schedule, costs) if costs else (0, 0, [])
    assert report.seconds == seconds
    assert list(report.spans) == spans
    assert report.peak_nbytes == 7 + peak


@given(schedules(max_buckets=9))
def test_what_a_schedule_does(schedule):
    n, kept = schedule.num_buckets, schedule.num_kept
    assert schedule.order("forward") == tuple(range(n))
    assert schedule.order("backward") == schedule.order("reduce") == tuple(reversed(range(n)))
    assert schedule.order("unshard") == (*range(n), *reversed(range(n - kept)))
    done = set()
    for op in schedule.ops:  # in a sound order even if nothing overlaps
        if op.action == "backward":
            assert ("forward", op.bucket) in done
        if op.computes:
            assert ("unshard", op.bucket) in done
        done.add((op.action, op.bucket))


@given(cases())
def test_bounds_and_monotonicity(case):
    schedule, costs = case
    report = simulate(schedule, costs)
    assert report.bound_seconds <= report.seconds <= report.compute_seconds + report.communication_seconds
    assert report.exposed_seconds == report.seconds - report.compute_seconds
    for faster in ("unshard", "reduce", "forward", "backward"):
        better = [dataclasses.replace(c, **{faster: c.seconds(faster) / 2}) for c in costs]
        assert simulate(schedule, better).seconds <= report.seconds


@given(cases())
def test_without_prefetch_and_with_one_gradient_nothing_overlaps(case):
    costs = [dataclasses.replace(c, kept_nbytes=0) for c in case[1]]
    n = len(costs)
    report = simulate(step_schedule(n, distance=0, limit=1, num_kept=0), costs)
    assert report.seconds == report.compute_seconds + report.communication_seconds
    largest = [max(c.unshard_nbytes + c.workspace_nbytes, c.grad_nbytes) for c in costs]
    assert report.peak_nbytes <= max((2 * x + c.grad_nbytes for x, c in zip(largest, costs, strict=True)), default=0)


@given(st.integers(1, 9), st.integers(0, 3), st.integers(1, 3), st.integers(0, 9))
def test_peak_is_resident_plus_buckets_in_flight(n, distance, more, resident):
    """With communication for nothing, forward holds the gathered buckets within the distance."""
    limit, num_kept = distance + more, min(n, least_kept(distance))
    costs = [BucketCost("b", 1, 2, 0, 0, 100, 0)] * n
    peak = simulate(step_schedule(n, distance=distance, limit=limit, num_kept=num_kept), costs, resident).peak_nbytes
    in_flight = min(n, distance + 1)
    assert resident + 100 * in_flight <= peak <= resident + 100 * min(n, in_flight + num_kept)


@given(cases())
def test_gathered_and_gradients_stay_within_the_limit(case):
    schedule, costs = case
    report = simulate(schedule, costs)
    spans = {
        (op.action, op.bucket, i): span for i, (op, span) in enumerate(zip(schedule.ops, report.spans, strict=True))
    }
    kept = range(schedule.num_buckets - schedule.num_kept, schedule.num_buckets)
    starts = sorted({start for start, _ in report.spans})
    one_gather = {"forward": [], "backward": []}
    for (action, bucket, i), (start, _) in spans.items():
        if action == "unshard" and bucket not in kept:
            half = "backward" if any(k[:2] == ("forward", bucket) and k[2] < i for k in spans) else "forward"
            end = next(e for (a, b, _), (_, e) in spans.items() if (a, b) == (half, bucket))
            one_gather[half].append((start, end))
    pending = [
        (start, next(e for (a, b, _), (_, e) in spans.items() if (a, b) == ("reduce", bucket)))
        for (action, bucket, _), (start, _) in spans.items()
        if action == "backward"
    ]
    for t in starts:
        assert sum(s <= t < e for half in one_gather.values() for s, e in half) <= schedule.limit
        assert sum(s <= t < e for s, e in pending) <= schedule.limit


def test_prefetch_hides_communication_that_is_shorter_than_computing():
    costs = [BucketCost(f"b{i}", 2.0, 4.0, 1.0, 1.0, 1, 1) for i in range(32)]
    report = simulate(step_schedule(32), costs)
    assert report.exposed_seconds == 2.0  # the first gather and the last reduction
    assert report.seconds == report.bound_seconds
    assert simulate(step_schedule(32, distance=0), costs).exposed_seconds == 64.0


def test_the_choice_spends_memory_for_time_and_no_more():
    costs = [BucketCost(f"b{i}", 1.0, 2.0, 1.5, 1.5, 100, 200) for i in range(16)]
    reports = [choose_step_schedule(costs, budget, resident_nbytes=1000) for budget in (1400, 1600, 2000, 5000)]
    times = [report.seconds for report in reports]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    for report, budget in zip(reports, (1400, 1600, 2000, 5000), strict=True):
        assert report.peak_nbytes <= budget
    cheap = [dataclasses.replace(c, unshard=0.1, reduce=0.1) for c in costs]
    assert choose_step_schedule(cheap, 5000, resident_nbytes=1000).peak_nbytes <= 1500
    with pytest.raises(ValueError, match="no schedule fits: the smallest peak is"):
        choose_step_schedule(costs, 1100, resident_nbytes=1000)


def test_costs_of_a_layout():
    tensors = (TensorSpec("w", (1024, 512), "bfloat16"), TensorSpec("b", (512,), "float32"))
    layout = plan([Group("emb", (TensorSpec("e", (4096, 512)),)), Group("mlp", tensors, stack=3)], 8).layout
    h100 = hardware("h100")
    costs = bucket_costs(layout, h100, tokens=100, active={"emb": 0.0}, reduce_dtype="float32", efficiency=1)
    assert [c.name for c in costs] == ["emb", "mlp[0]", "mlp[1]", "mlp[2]"]
    assert costs[0].forward == 0
    assert costs[1].forward == pytest.approx(2 * 100 * (1024 * 512 + 512) / h100.flops)
    assert costs[1].backward == pytest.approx(3 * costs[1].forward)
    assert costs[1].unshard_nbytes == 8 * layout.bucket("mlp").shard_nbytes // 3
    assert costs[1].grad_nbytes > costs[1].unshard_nbytes
    assert costs[1].unshard == pytest.approx(h100.latency + costs[1].unshard_nbytes * 7 / 8 / h100.link_bandwidth)
    assert bucket_costs(plan([Group("mlp", tensors)], 1).layout, h100, tokens=1)[0].unshard == 0
    with pytest.raises(ValueError, match=r"no such buckets: \['x'\]"):
        bucket_costs(layout, h100, tokens=1, active={"x": 0.5})
    with pytest.raises(ValueError, match="efficiency"):
        bucket_costs(layout, h100, tokens=1, efficiency=0)


@given(st.floats(1.0, 8.0), schedules(max_buckets=5))
def test_more_bandwidth_is_never_slower(factor, schedule):
    tensors = tuple(TensorSpec(f"w{i}", (512, 512)) for i in range(schedule.num_buckets))
    layout = plan([Group(t.name, (t,)) for t in tensors], 8).layout
    cpu = hardware("cpu")
    faster = dataclasses.replace(cpu, link_bandwidth=cpu.link_bandwidth * factor)
    slow, fast = (simulate(schedule, bucket_costs(layout, p, tokens=64)) for p in (cpu, faster))
    assert fast.seconds <= slow.seconds


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"distance": 2, "limit": 2}, "below the limit"),
        ({"distance": -1}, "at least 0"),
        ({"num_kept": 5}, "num_kept must be between"),
        ({"distance": 3, "limit": 4, "num_kept": 1}, "the last 2 buckets are needed again"),
    ],
)
def test_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        step_schedule(4, **wrong)
    with pytest.raises(ValueError, match="waits for a later one"):
        StepSchedule(1, 0, 1, 0, (Op("unshard", 0, (0,)),))
    with pytest.raises(ValueError, match="2 costs for a schedule of 1"):
        simulate(step_schedule(1), [BucketCost("b", 1, 1, 1, 1, 1, 1)] * 2)
    with pytest.raises(ValueError, match="must not be negative"):
        BucketCost("b", -1, 1, 1, 1, 1, 1)
