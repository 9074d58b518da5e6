"""What can go wrong with a checkpoint: kills, full disks, damage, other jobs, ranks that fail or disagree."""

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from checkpoint_killer import SHAPES, check, save, values

from ragged_jax.checkpoint import (
    BaseCheckpointer,
    Checkpoint,
    CheckpointDirectory,
    CheckpointError,
    Part,
    TensorEntry,
    _room,
    _write,
)
from ragged_jax.checkpoint._manifest import Manifest
from ragged_jax.checkpoint._saving import Saving
from ragged_jax.layout import Bucket, Layout, Placement, Slab, TensorSpec

HERE = Path(__file__).parent
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"


def run_python(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_at_any_moment(tmp_path):
    kills = 200 if DEEP else 20
    in_the_middle = int(run_python(str(HERE / "checkpoint_killer.py"), str(tmp_path), str(kills), "0"))
    assert in_the_middle >= kills / 4


@pytest.mark.parametrize(
    ("call", "number"),
    [("writev", errno.ENOSPC), ("fsync", errno.ENOSPC), ("open", errno.EACCES), ("rename", errno.EIO)],
)
@pytest.mark.filterwarnings("ignore:step . is one more than to keep:UserWarning")
def test_a_failing_disk_leaves_nothing_half_made(tmp_path, monkeypatch, call, number):
    """The first such call fails, then the second, and so on until a save makes no more of them."""
    folder = CheckpointDirectory(tmp_path)
    save(folder, 0)
    real, count, failures, newest = getattr(os, call), 0, 0, 0

    def failing(*args, **kwargs):
        nonlocal count
        count += 1
        if count == failures + 1:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    for step in range(1, 100):
        count = 0
        try:
            save(folder, step)
        except OSError:
            failures += 1
            monkeypatch.setattr(os, call, real)
            assert {p.name for p in tmp_path.iterdir()} == {f"step_{s:08d}" for s in folder.steps()}
            assert folder.steps()[-1] in (newest, step)
            newest = folder.steps()[-1]
            for kept in folder.steps():
                with folder.open(kept) as checkpoint:
                    check(checkpoint)
            monkeypatch.setattr(os, call, failing)
        else:
            break
    assert failures >= (1 if call == "rename" else 4)


def test_a_file_that_may_not_grow(tmp_path):
    """The kernel's own error in the middle of a write."""
    folder = CheckpointDirectory(tmp_path)
    save(folder, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            save(folder, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000000"]
    save(folder, 1)
    check(folder.open())


@pytest.mark.parametrize(("number", "fails"), [(errno.ENOSPC, True), (errno.EOPNOTSUPP, False)])
def test_room_is_taken_before_anything_is_written(tmp_path, monkeypatch, number, fails):
    """Where the file system can: others are written to without."""
    asked, written, real = [], [], os.writev

    def fallocate(descriptor, mode, start, nbytes):
        asked.append(nbytes)
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(_room, "_fallocate", lambda: fallocate)
    monkeypatch.setattr(os, "writev", lambda *args: written.append(real(*args)) or written[-1])
    tensors, part = {"w": TensorEntry("uint8", (2 << 20,))}, Part("w", ((0, 2 << 20),), np.ones(2 << 20, np.uint8))
    with pytest.raises(OSError, match="No space left") if fails else contextlib.nullcontext():
        CheckpointDirectory(tmp_path).save(1, tensors, [part])
    assert len(asked) == 1
    assert asked[0] > 2 << 20
    assert os.listdir(tmp_path) == ([] if fails else ["step_00000001"])
    assert bool(written) is not fails


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A checkpoint of two data files, one of several chunks, and a layout file."""
    tensors = {"a": TensorEntry("float32", (700, 1000)), "b": TensorEntry("int8", (9,))}
    rng = np.random.default_rng(0)
    data = {"a": rng.normal(size=700_000).astype(np.float32), "b": np.arange(9, dtype=np.int8)}
    parts = [Part(name, ((0, x.size),), x, group=name) for name, x in data.items()]
    spec = TensorSpec("b", (9,), "int8")
    layout = Layout(3, (Bucket("", (Slab("b", "int8", 3, 1, (Placement(spec, 0),), sole=True),)),))
    folder = CheckpointDirectory(tmp_path_factory.mktemp("sound"))
    return folder.save(1, tensors, parts, layouts={"": layout})


def read_all(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        for name in checkpoint:
            checkpoint.read(name)
        assert checkpoint.layouts


def test_the_sound_one_is_sound(sound):
    read_all(sound)
    assert sorted(p.name for p in sound.iterdir()) == [
        "a.00000.safetensors", "b.00000.safetensors", "layout.json", "manifest.json",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a.00000.safetensors", "b.00000.safetensors", "layout.json", "manifest.json"])
def test_a_flipped_bit_anywhere(tmp_path, sound, name):
    path = Path(shutil.copytree(sound, tmp_path / "copy"))
    data = bytearray((path / name).read_bytes())
    rng = np.random.default_rng(0)
    for at in [0, 7, 8, len(data) // 2, len(data) - 1, *rng.integers(0, len(data), 10).tolist()]:
        data[at] ^= 1 << int(rng.integers(8))
        (path / name).write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            read_all(path)
        assert name in str(caught.value)
        if name != "manifest.json":
            assert f"{path}: {name}, bytes " in str(caught.value)
            with Checkpoint(path) as checkpoint:
                (fault,) = checkpoint.verify()
            assert fault == str(caught.value).split(" (reading")[0]
        data = bytearray((sound / name).read_bytes())


def test_the_damaged_range_is_named(tmp_path, sound):
    path = Path(shutil.copytree(sound, tmp_path / "copy"))
    data = bytearray((path / "a.00000.safetensors").read_bytes())
    data[(1 << 18) + 5] ^= 1
    (path / "a.00000.safetensors").write_bytes(data)
    with Checkpoint(path) as checkpoint:
        start = checkpoint.entry("a").pieces[0].offset
        low, high = ((1 << 18) - start) // 4, -(-((2 << 18) - start) // 4)
        message = f"a.00000.safetensors, bytes 262144 to 524288: the checksum is wrong; there lie a[{low}:{high}]"
        (fault,) = checkpoint.verify()
        assert fault == f"{path}: {message}"
        np.testing.assert_array_equal(checkpoint.read("b"), np.arange(9))  # the rest can still be had


@pytest.mark.parametrize("name", ["a.00000.safetensors", "b.00000.safetensors", "layout.json", "manifest.json"])
def test_a_file_that_is_cut_or_gone(tmp_path, sound, name):
    path = Path(shutil.copytree(sound, tmp_path / "copy"))
    whole = (path / name).read_bytes()
    for length in (0, 1, 8, len(whole) // 2, len(whole) - 1):
        (path / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=name):
            Checkpoint(path)
    for other in (lambda file: os.mkfifo(file), lambda file: file.symlink_to("/dev/zero")):
        (path / name).unlink()
        other(path / name)
        with pytest.raises(CheckpointError, match=f"{name}: not a file"):
            Checkpoint(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: No such file") as caught:
        Checkpoint(path)
    assert {"a": "a[0:700000]", "b": "b[0:9]"}.get(name[0], "") in str(caught.value)
    (path / name).mkdir()
    with pytest.raises(CheckpointError, match=name):
        Checkpoint(path)


def test_the_latest_sound_one_is_found(tmp_path):
    folder = CheckpointDirectory(tmp_path)
    assert folder.latest() is None
    for step in (1, 2, 30):
        save(folder, step)
    (tmp_path / "step_junk").mkdir()
    assert folder.steps() == [2, 30]
    (folder.folder(30) / "b.00000.safetensors").unlink()
    with pytest.warns(
        UserWarning, match=r"step 30 is passed over: .*\n.*b.00000.safetensors: No such file"
    ) as caught:
        assert folder.latest() == 2
    assert caught[0].filename == __file__
    with pytest.raises(CheckpointError, match=r"b/w\[0:250000\]"):
        folder.open(30)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 3 .* \[2, 30\]"):
        folder.open(3)


def test_steps_only_rise(tmp_path):
    folder = CheckpointDirectory(tmp_path)
    save(folder, 5)
    for step in (4, 5):
        with pytest.raises(FileExistsError, match="a checkpoint of step 5 already"):
            save(folder, step)
    assert os.listdir(tmp_path) == ["step_00000005"]


def test_what_only_looks_like_a_step_is_none(tmp_path):
    for name in ("step_000000001", "step_١٢٣٤٥٦٧٨", "step_" + "9" * 30, "step_1"):
        (tmp_path / name).mkdir()
    folder = CheckpointDirectory(tmp_path)
    assert (folder.steps(), folder.latest()) == ([], None)
    save(folder, 1)
    assert folder.steps() == [1]


def test_what_the_killed_left_is_removed_and_what_others_write_is_not(tmp_path):
    for name in ("dead", "alive"):
        (tmp_path / f".step_00000001.{name}.tmp").mkdir()
        (tmp_path / f".step_00000001.{name}.lock").touch()
    (tmp_path / ".step_00000001.torn.old").mkdir()
    with open(tmp_path / ".step_00000001.alive.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        save(CheckpointDirectory(tmp_path), 2)
    assert sorted(os.listdir(tmp_path)) == [
        ".step_00000001.alive.lock", ".step_00000001.alive.tmp", "step_00000002",
    ]  # fmt: skip


def test_an_old_checkpoint_that_may_not_be_removed_fails_no_save(tmp_path, monkeypatch):
    folder, real = CheckpointDirectory(tmp_path), os.rename
    save(folder, 1)

    def failing(source, target):
        if Path(source) == folder.folder(1):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        real(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.warns(UserWarning, match=r"step 1 is one more than to keep, and stays: .*not permitted"):
        folder.save(2, {"w": TensorEntry("float32", (0,))}, [], keep=1)
    assert folder.steps() == [1, 2]
    monkeypatch.undo()
    folder.save(3, {"w": TensorEntry("float32", (0,))}, [], keep=1)
    assert folder.steps() == [3]


def test_a_link_to_a_checkpoint_goes_and_the_checkpoint_stays(tmp_path):
    save(CheckpointDirectory(tmp_path / "other"), 3)
    folder = CheckpointDirectory(tmp_path / "run")
    folder.path.mkdir()
    folder.folder(1).symlink_to(tmp_path / "other" / "step_00000003")
    assert folder.latest() == 1
    for step in (2, 4, 5):
        save(folder, step)  # keeps two
    assert sorted(os.listdir(folder.path)) == ["step_00000004", "step_00000005"]
    check(CheckpointDirectory(tmp_path / "other").open())


def test_two_jobs_in_one_directory(tmp_path):
    """Each step is one job's, whole; the other job hears of it."""

    def job(name: str) -> list[int]:
        won = []
        for step in range(12):
            tensors = {f"t{i}": TensorEntry("uint8", (50_000,)) for i in range(3)}
            data = np.full(50_000, ord(name), np.uint8)
            parts = [Part(f"t{i}", ((0, data.size),), data, group=f"{i}") for i in range(3)]
            try:
                CheckpointDirectory(tmp_path).save(step, tensors, parts, metadata={"job": name}, keep=100)
                won.append(step)
            except FileExistsError:
                pass
        return won

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(job, "AB")
    folder = CheckpointDirectory(tmp_path)
    assert sorted(first + second) == folder.steps()
    assert folder.steps()
    for step in folder.steps():
        with folder.open(step) as checkpoint:
            job = checkpoint.metadata["job"]
            assert step in (first if job == "A" else second)
            assert all((checkpoint.read(name) == ord(job)).all() for name in checkpoint)
    assert not list(tmp_path.glob(".*"))


def save_as(rank: int, folder: Path, num_ranks: int = 3, shape=(12,), fails: bool = False, **kwargs) -> Path:
    """One rank's share of a save: rows of `w`; the first also has `s`."""
    low, high = 12 * rank // num_ranks, 12 * (rank + 1) // num_ranks
    data = np.arange(low, high, dtype=np.float32)
    parts = [Part("w", ((low, high),), data[1:] if fails else data)]
    parts += [Part("s", ((0, 1),), np.array(7))] if rank == 0 else []
    tensors = {"w": TensorEntry("float32", shape), "s": TensorEntry("int64", ())}
    options = {"rank": rank, "num_ranks": num_ranks, "run": "r", "timeout": 10.0, **kwargs}
    return CheckpointDirectory(folder).save(3, tensors, parts, **options)


def together(*ranks) -> list[Path | Exception]:
    """Runs the ranks at the same time; what each returns or raises."""

    def caught(rank):
        try:
            return rank()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(caught, ranks))


def test_ranks_save_together(tmp_path):
    got = together(*(lambda r=r: save_as(r, tmp_path) for r in range(3)))
    assert got == [tmp_path / "step_00000003"] * 3
    with Checkpoint(got[0]) as checkpoint:
        assert checkpoint.manifest.num_ranks == 3
        assert len(checkpoint.entry("w").pieces) == 3
        np.testing.assert_array_equal(checkpoint.read("w"), np.arange(12))
        assert checkpoint.read("s") == 7
        assert checkpoint.verify() == []
        names = {file.name for file in checkpoint.manifest.files}
    assert {p.name for p in got[0].iterdir()} == names | {"manifest.json"}
    assert os.listdir(tmp_path) == ["step_00000003"]


def test_ranks_that_disagree_all_hear_the_same(tmp_path):
    got = together(
        lambda: save_as(0, tmp_path), lambda: save_as(1, tmp_path, shape=(13,)), lambda: save_as(2, tmp_path)
    )
    assert all(isinstance(error, CheckpointError) for error in got), got
    assert len({str(error) for error in got}) == 1
    assert "w: rank 1 has float32[13], rank 0 float32[12]" in str(got[0])
    assert not [name for name in os.listdir(tmp_path) if not name.endswith(".error")]


def test_a_folder_that_goes_while_a_rank_looks_is_no_success(tmp_path, monkeypatch):
    """The first rank fails right after another one has looked for a failure and found none."""
    saving, final = Saving(tmp_path, 3, 1, 2, "r", 10.0), tmp_path / "step_00000003"
    final.mkdir()  # of another job
    saving.folder.mkdir()
    looked = []

    def fails_then(self, real=Path.exists):
        if self == saving.folder and len(looked) < 3:
            looked.append(self)
            if len(looked) == 3:
                Saving(tmp_path, 3, 0, 2, "r", 10.0)._fail(CheckpointError("the first rank failed"))
        return real(self)

    monkeypatch.setattr(Path, "exists", fails_then)
    with pytest.raises(CheckpointError, match="the first rank failed"), saving.together():
        saving.run(final, Manifest(3, 2, (), {}), (), {}, begin=lambda: None)
    assert len(looked) == 3


def all_the_same(got: list, *said: str) -> None:
    """Every rank raised the same error, which says this."""
    assert {type(error) for error in got} == {CheckpointError}, got
    assert len({str(error) for error in got}) == 1, got
    for text in said:
        assert text in str(got[0])


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_fails_fails_all(tmp_path, rank):
    got = together(*(lambda r=r: save_as(r, tmp_path, fails=r == rank, timeout=600.0) for r in range(3)))
    all_the_same(got, f"step 3 was not saved: rank {rank}: ValueError: ", "are 16 bytes, given 12")
    assert isinstance(got[rank].__cause__, ValueError)
    assert os.listdir(tmp_path) == [".step.r.error"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_fails_all(tmp_path, monkeypatch, rank):
    real = _write.write_safetensors

    def full(path, *args, **kwargs):
        if path.name.endswith(f"{rank:05d}.safetensors"):
            path.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(_write, "write_safetensors", full)
    got = together(*(lambda r=r: save_as(r, tmp_path, timeout=600.0) for r in range(3)))
    all_the_same(got, f"step 3 was not saved: rank {rank}: OSError: [Errno 28] No space left on device")
    assert os.listdir(tmp_path) == [".step.r.error"]


def test_a_rank_that_fails_late_takes_nothing_away(tmp_path, monkeypatch):
    """Once a rank has said that its files are written, the first may finish before it hears of a failure."""
    wait, first_said = Saving._wait, Saving._first_said

    def fails(self, ready, whom):
        if self.rank == 1 and whom == "rank 0 to finish":
            raise TimeoutError("too slow")
        wait(self, ready, whom)

    def too_late(self, mine):
        wait(self, (tmp_path / "step_00000003").exists, "rank 0")
        return first_said(self, mine)

    monkeypatch.setattr(Saving, "_wait", fails)
    monkeypatch.setattr(Saving, "_first_said", too_late)
    got = together(*(lambda r=r: save_as(r, tmp_path) for r in range(3)))
    assert got[0] == tmp_path / "step_00000003"
    assert isinstance(got[1], TimeoutError)
    with CheckpointDirectory(tmp_path).open(3) as checkpoint:
        assert checkpoint.verify() == []


def test_a_rank_without_room_for_a_reason(tmp_path):
    """The message of a rank that failed may be empty, but not for long: it is written at once."""
    (tmp_path / ".step.r.error").touch()
    os.utime(tmp_path / ".step.r.error", 2 * (time.time() - 10,))
    all_the_same(together(*(lambda r=r: save_as(r, tmp_path) for r in range(3))), "had no room to say why")


class OneOf(BaseCheckpointer):
    """A checkpointer of three ranks that share their memory. A state is how long `w` is said to be; a text fails."""

    def __init__(self, rank: int, directory: Path, **kwargs):
        self._number = rank
        super().__init__(directory, **kwargs)

    @property
    def _rank(self) -> int:
        return self._number

    @property
    def _num_ranks(self) -> int:
        return 3

    def _from_first(self, value: np.ndarray) -> np.ndarray:
        return np.zeros_like(value)

    def _contents(self, state):
        tensors = {"w": TensorEntry("float32", (12 + 0 * state,))}
        low, high = 4 * self._number, 4 * self._number + 4
        return tensors, [Part("w", ((low, high),), np.arange(low, high, dtype=np.float32))], {}


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_fails_before_it_writes(tmp_path, background):
    """Nobody waits for it, and the next save is a save."""
    ranks = [OneOf(r, tmp_path, background=background) for r in range(3)]

    def save(of: OneOf, step: int, state, metadata=None) -> None:
        of.save(step, state, metadata)
        of.wait()

    def all_save(step, states, metadata=(None, None, None)) -> list:
        return together(*(lambda r=r: save(ranks[r], step, states[r], metadata[r]) for r in range(3)))

    all_the_same(all_save(1, [1, "a leaf", 1]), "step 1 was not saved: rank 1: TypeError: ")
    all_the_same(all_save(1, ["a leaf", 1, 1]), "step 1 was not saved: rank 0: TypeError: ")
    all_the_same(all_save(1, [1, 1, 1], [{}, {}, {"loss": float("nan")}]), "rank 2: ValueError: Out of range float")
    assert all_save(1, [1, 1, 1]) == [None] * 3
    all_the_same(all_save(2, ["a leaf", "another", 1]), "step 2 was not saved: rank ")
    assert all_save(3, [1, 1, 1]) == [None] * 3
    all_the_same(together(*(lambda r=r: save(ranks[r], 4 + r // 2, 1) for r in range(3))), "rank 2 saves step 5 with")
    assert sorted(name for name in os.listdir(tmp_path) if not name.endswith(".error")) == [
        "step_00000001", "step_00000003",
    ]  # fmt: skip


def test_where_the_first_rank_cannot_look_all_fail(tmp_path):
    (tmp_path / "run").touch()
    said: Future = Future()

    class Broadcasting(OneOf):
        def _from_first(self, value: np.ndarray) -> np.ndarray:
            if self._rank == 0:
                said.set_result(value) if not said.done() else None
            return said.result(timeout=5)

    ranks = [OneOf(rank, tmp_path / "run") for rank in range(3)]
    for rank in ranks:
        rank.__class__ = Broadcasting
    got = together(*(rank.latest for rank in ranks))
    assert [type(error) for error in got] == [NotADirectoryError, CheckpointError, CheckpointError]
    assert str(got[1]) == str(got[2]) == f"the first rank could not look for checkpoints in {tmp_path / 'run'}"


def test_a_rank_that_does_not_come_is_named(tmp_path):
    got = together(*(lambda r=r: save_as(r, tmp_path, timeout=0.3 + 60 * r) for r in range(2)))
    for error in got:
        assert isinstance(error, TimeoutError)
        assert str(error) == "step 3: rank 0 waited 0.3 s for rank 2"
    (alone,) = together(lambda: save_as(1, tmp_path, timeout=0.05, run="other"))
    assert str(alone) == "step 3: rank 1 waited 0.05 s for rank 0 to begin"


def test_elements_that_no_rank_saved(tmp_path):
    got = together(*(lambda r=r: save_as(r, tmp_path, num_ranks=2, shape=(13,)) for r in range(2)))
    assert len({str(error) for error in got}) == 1
    assert "w: elements 12 to 13 of 13 are missing" in str(got[0])


# Not `ru_maxrss`: a new program begins with what the process had that started it.
RSS = """
import sys
def rss(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
def begin():
    open("/proc/self/clear_refs", "w").write("5")  # the peak from here on
    return rss("VmRSS")
"""

NUMPY = """
from ragged_jax.checkpoint import Checkpoint, read_shard
from ragged_jax.layout import Layout
layout = Layout.from_json(open(sys.argv[2]).read())
with Checkpoint(sys.argv[1]) as checkpoint:
    before = begin()
    shard = read_shard(checkpoint, layout, 2)
    after = rss("VmHWM")
assert all((x == 1).mean() > 0.9 for x in shard.values())
print(after - before, sum(x.nbytes for x in shard.values()))
"""

# A process of a job has some of the mesh's devices: here one, so that its share is all that it restores.
JAX = """
import jax, numpy as np
import ragged_jax as rj
mesh = jax.make_mesh((1,), ("fsdp",))
warm = rj.shard_tree({"x": np.ones(3, np.float32)}, mesh, axis="fsdp")
like = rj.shard_tree({"b2": {"w": jax.ShapeDtypeStruct((5000, 2000), np.float32)}}, mesh, axis="fsdp")
before = begin()
got = rj.Checkpointer(sys.argv[1] + "/..").restore(like)
after = rss("VmHWM")
full = jax.tree.leaves(got)
assert all((np.asarray(x) == 1).all() for x in full)
print(after - before, sum(x.nbytes for x in full))
"""


@pytest.mark.parametrize(
    "program", [pytest.param(NUMPY, id="numpy"), pytest.param(JAX, id="jax", marks=pytest.mark.deep)]
)
def test_memory_of_restoring_a_shard(tmp_path, program):
    """A fifth of what 3 ranks saved: at most that share, its largest slice and 64 MB."""
    from ragged_jax.checkpoint import shard_parts, slab_tensors
    from ragged_jax.planner import Group, plan

    groups = [Group(f"b{i}", (TensorSpec(f"b{i}/w", (5000, 2000)), TensorSpec(f"b{i}/b", (1001,)))) for i in range(5)]
    old, new = (plan(groups, n).layout for n in (3, 5))
    ones = {
        (b.name, s.name): np.ones((1, s.shard_numel), np.float32) for b in old.buckets for s in b.slabs
    }  # the same for each shard
    tensors = {n: t for b in old.buckets for s in b.slabs for n, t in slab_tensors(b, s).items()}
    parts = [part for k in range(3) for part in shard_parts(old, k, ones)]
    path = CheckpointDirectory(tmp_path).save(1, tensors, parts)
    (tmp_path / "layout").write_text(new.to_json())
    peak, share = map(int, run_python("-c", RSS + program, str(path), str(tmp_path / "layout")).split())
    assert new.payload_nbytes > 190 << 20
    assert share >= new.payload_nbytes / 5.1
    largest = share if program is JAX else 5000 * 2000 * 4 / 5
    print(f"{peak / 1024:.0f} MiB for a share of {share / 2**20:.0f} MiB")
    assert share <= peak * 1024 <= share + largest + (64 << 20)
    shutil.rmtree(path)


def test_the_values_differ_by_step():
    """Else the checks above could not fail."""
    assert all(not np.array_equal(values(1)[name], values(2)[name]) for name in SHAPES)
    assert threading.active_count() < 50
