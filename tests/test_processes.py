"""Two processes with two devices each: they agree or fail alike, train as one, and neither hangs without the other.

One pair of processes runs every case (`two_processes.py`); the tests read what it left.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from models import Block, OddModel, batches, flat, make_mesh, train_sharded

import ragged_jax as rj
from ragged_jax.fsdp._processes import check_layout_on_all_processes
from ragged_jax.layout import disagreement

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(out: Path, script: str, port: int, rank: int, *arguments: str, num_devices: int = 2) -> subprocess.Popen:
    """A process of several, with devices of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    command = [sys.executable, str(ROOT / "tests" / script), str(out), str(port), str(rank), *arguments]
    with (out / f"log{rank}").open("a") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict:
    """What both left: results and exit codes by rank, and how long rank 0 lived after rank 1 was killed."""
    out, port = tmp_path_factory.mktemp("pair"), free_port()
    with rj.Checkpointer(out / "of_one") as checkpointer:
        checkpointer.save(1, state_of(make_mesh(3), 3))
    damaged = Path(shutil.copytree(out / "of_one", out / "damaged")) / "step_00000001" / "root.00000.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-70] ^= 1
    damaged.write_bytes(data)
    processes = [start(out, "two_processes.py", port, rank) for rank in range(2)]
    try:
        processes[1].wait(timeout=200)
        killed = time.monotonic()
        processes[0].wait(timeout=60)
        survived = time.monotonic() - killed
    finally:
        for process in processes:
            process.kill()
    printed = [(out / f"log{rank}").read_text() for rank in range(2)]
    for rank in range(2):
        assert (out / f"stepping{rank}").exists(), printed[rank]
    return {
        "out": out,
        "results": [json.loads((out / f"results{rank}.json").read_text()) for rank in range(2)],
        "returned": [process.returncode for process in processes],
        "survived": survived,
    }


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("leaf set", "extra: missing on process 0; float32[3] in blocks elements(1) in unit (root) on process 1"),
        ("shape", "a: float32[6, 4] in blocks elements(1) in unit (root) on process 0; float32[7, 4]"),
        ("dtype", "b: float32[5] in blocks elements(1) in unit (root) on process 0; int32[5]"),
        ("block", "a: float32[6, 4] in blocks rows(1) in unit (root) on process 0; float32[6, 4] in blocks rows(2)"),
        ("units", "x/a: float32[6, 4] in blocks elements(1) in unit (root) on process 0; float32[6, 4]"),
        ("precision", "precision: None on process 0; MixedPrecision(param_dtype='bfloat16'"),
        ("mesh", "mesh: {'fsdp': 4} on process 0; {'replica': 2, 'fsdp': 2} on process 1"),
        ("module", "kernel: float32[8, 8] in blocks elements(1) in unit (root) on process 0; float32[8, 9]"),
        ("deferred", "kernel: float32[8, 8] in blocks elements(1) in unit (root) on process 0; float32[8, 9]"),
        ("saving, background=False", "extra: rank 1 has int64[], rank 0 nothing"),
        ("saving, background=True", "extra: rank 1 has int64[], rank 0 nothing"),
        ("saving a text, background=False", "step 1 was not saved: rank 1: TypeError: a checkpoint holds arrays and"),
        ("saving a text, background=True", "step 1 was not saved: rank 1: TypeError: a checkpoint holds arrays and"),
        ("saving no JSON, background=False", "step 1 was not saved: rank 1: TypeError: Object of type set"),
        ("saving no JSON, background=True", "step 1 was not saved: rank 1: TypeError: Object of type set"),
        (
            "restoring",
            "the states to restore differ between processes, so none of them goes on:\n  extra: ",
        ),
        ("not there", "opened: yes on process 0; FileNotFoundError: there is no checkpoint of step 1 in"),
        ("restoring a text", "known: yes on process 0; TypeError: a checkpoint holds arrays and numbers"),
        ("damaged", "restored: yes on process 0; CheckpointError:"),
        ("facts", "the checkpoints differ between processes, so none of them goes on:\n  step: 0 on process 0; 1 on"),
    ],
)
def test_what_differs_is_named_alike_on_both(pair, case, said):
    zero, one = (results["disagreeing"][case] for results in pair["results"])
    assert zero["error"] == one["error"] == ("CheckpointError" if case.startswith("saving") else "ValueError")
    assert zero["message"] == one["message"]
    assert said in zero["message"]
    assert max(zero["seconds"], one["seconds"]) < 10


def test_processes_that_agree_go_on(pair):
    assert [results["disagreeing"]["same"]["error"] for results in pair["results"]] == [None, None]


def test_a_process_that_does_not_come_is_named(pair):
    missing = pair["results"][0]["missing"]
    assert missing["error"] == "TimeoutError"
    assert "the configs: of processes [0, 1], [1] did not come to compare within 1 s" in missing["message"]
    assert missing["seconds"] < 5


def test_two_processes_are_one_job(pair):
    """Created, trained and looked at as in one process with as many devices."""
    model = rj.fully_shard(
        OddModel(rngs=nnx.Rngs(0), scan=True), make_mesh(4), axis="fsdp", units=Block, stacked=Block
    )
    loaded = {
        name: [dict(np.load(pair["out"] / f"{name}{k}.npz")) for k in range(2)] for name in ("init", "trained", "got")
    }
    for got in loaded["init"]:
        for name, value in flat(rj.full_params(model)).items():
            assert got[name].tobytes() == value.tobytes(), name
    losses = train_sharded(model, data=batches(2, 40))
    whole = flat(rj.full_params(model))
    for rank in range(2):
        np.testing.assert_allclose(pair["results"][rank]["losses"], losses, rtol=1e-6)
        for name, value in whole.items():
            np.testing.assert_allclose(loaded["trained"][rank][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
            if name.startswith("blocks") and name.endswith("kernel"):
                np.testing.assert_array_equal(loaded["got"][rank][name], loaded["trained"][rank][name])
    for name, value in rj.norms(model).items():
        for results in pair["results"]:
            np.testing.assert_allclose(results["norms"][name], value, rtol=1e-5, err_msg=name)
    zero, one = (results["nonfinite"] for results in pair["results"])
    assert zero == one
    assert zero[0].startswith("blocks/up/kernel[0, 0, 0] on")
    assert zero[0].endswith("the first of 9600 that are not finite")


def state_of(mesh, scale: float) -> dict:
    """As in `two_processes.py`."""
    w, b = np.arange(35, dtype=np.float32).reshape(5, 7), np.arange(11, dtype=np.float32)
    return {"params": rj.shard_tree({"w": scale * w, "b": scale * b}, mesh, axis="fsdp"), "step": int(scale)}


@pytest.mark.parametrize("num_devices", [1, 3, 4])
def test_what_two_processes_save_one_restores(pair, num_devices):
    got = rj.Checkpointer(pair["out"] / "of_two").restore(state_of(make_mesh(num_devices), 0))
    want = rj.full_params(state_of(make_mesh(1), 2)["params"])
    assert got["step"] == 2
    for name, x in rj.full_params(got["params"]).items():
        np.testing.assert_array_equal(x, want[name])
    with rj.Checkpointer(pair["out"] / "of_two").open() as checkpoint:
        assert checkpoint.manifest.num_ranks == 2
        assert checkpoint.verify() == []


def test_what_is_saved_two_processes_restore(pair):
    want = rj.full_params(state_of(make_mesh(1), 3)["params"])
    for rank in range(2):
        assert pair["results"][rank]["restored"] == [2, 3]
        with np.load(pair["out"] / f"restored{rank}.npz") as got:
            np.testing.assert_array_equal(got["w"], want["w"])
            np.testing.assert_array_equal(got["b"], want["b"])
            np.testing.assert_array_equal(got["2w"], 2 / 3 * want["w"])
    assert not (pair["out"] / "never").exists() or not list((pair["out"] / "never").glob("step_*"))


@pytest.mark.deep
@pytest.mark.parametrize("num", [3, 4])
def test_what_two_processes_save_others_restore(pair, num):
    want, port = rj.full_params(state_of(make_mesh(1), 2)["params"]), free_port()
    processes = [start(pair["out"], "some_processes.py", port, r, str(num), num_devices=1) for r in range(num)]
    try:
        returned = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert returned == [0] * num, [(pair["out"] / f"log{rank}").read_text()[-2000:] for rank in range(num)]
    for rank in range(num):
        with np.load(pair["out"] / f"restored{rank}of{num}.npz") as got:
            assert got["step"] == 2
            np.testing.assert_array_equal(got["w"], want["w"])
            np.testing.assert_array_equal(got["b"], want["b"])


def test_two_processes_move_a_state_to_three_of_their_devices(pair):
    want = rj.full_params(state_of(make_mesh(1), 2)["params"])
    for rank in range(2):
        with np.load(pair["out"] / f"moved{rank}.npz") as got:
            assert got["step"] == 2
            np.testing.assert_array_equal(got["w"], want["w"])
            np.testing.assert_array_equal(got["b"], want["b"])
        refused = pair["results"][rank]["by host"]
        assert refused["error"] == "NotImplementedError"
        assert "are on devices of other processes; save it with a `Checkpointer` and restore it" in refused["message"]


def test_the_formats_of_others(pair):
    """Both write and read what is theirs; where the first one fails the other does not wait for it."""
    for results in pair["results"]:
        assert results["exchange"]["back"] == 2 * [np.arange(35.0).reshape(7, 5).tolist()]
        assert "b: extra, no rule speaks of it" in results["exchange"]["again"]["message"]
    assert not list(pair["out"].glob("*other*"))
    assert not list(pair["out"].glob(".hf*"))


def test_a_killed_process_ends_the_other_with_an_error(pair):
    assert pair["returned"][1] == -9
    assert pair["returned"][0] not in (0, None)
    assert pair["survived"] < 40  # heartbeats may stay away for 10 s


def test_a_single_process_compares_nothing():
    assert jax.process_count() == 1
    rj.check_same_on_all_processes({"anything": "at all"})


def test_devices_of_a_machine_that_is_not_here_are_not_asked():
    """Ahead-of-time compiles shard over the topologies of whole clusters."""
    elsewhere = SimpleNamespace(
        devices=np.array([SimpleNamespace(process_index=i) for i in range(4)]), shape={"fsdp": 4}
    )
    layout = rj.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, 4).layout
    check_layout_on_all_processes(layout, elsewhere, ("fsdp",))


def test_the_message_names_runs_of_processes_and_stays_short():
    many = [{"w": "1"}, {"w": "1"}, {"w": "2"}, {"w": "1"}, {}]
    assert disagreement(many) == "  w: 1 on processes 0-1, 3; 2 on process 2; missing on process 4"
    assert disagreement([{"w": "1"}] * 3) is None
    long = disagreement([{str(i): "0" for i in range(100)}, {str(i): "1" for i in range(100)}])
    assert long is not None
    assert long.endswith("and 50 more")
