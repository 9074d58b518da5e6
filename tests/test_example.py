"""`examples/train_gpt.py` as users start it: in processes of its own, with a tiny model."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
TINY = "--steps 30 --length 32 --learning-rate 0.01 --held-out 2048 --sample 4 --model.depth 2 --model.width 64"


def start(out: Path, *args: str) -> subprocess.Popen:
    command = [sys.executable, "examples/train_gpt.py", *TINY.split(), "--out", str(out), *args]
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")} | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT)


def finish(*processes: subprocess.Popen) -> list[str]:
    """What they printed; none of them outlives the call."""
    try:
        printed = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == 0, text
    return printed


def held_out(printed: str) -> tuple[float, ...]:
    """Bits per byte: before, after, and of the bigram model."""
    before, after = re.findall(r"held out, \w+: ([\d.]+)", printed)
    return float(before), float(after), float(re.findall(r"bigram model: ([\d.]+)", printed)[0])


ODD = ("--devices", "3", "--block", "tile:16x16")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A run that nothing stops, and what it printed."""
    out = tmp_path_factory.mktemp("learnt")
    return out, finish(start(out, *ODD))[0]


def test_learns_and_reports(learnt):
    check_report(*learnt, 3)


@pytest.mark.deep
def test_learns_and_reports_on_8(tmp_path):
    check_report(tmp_path, *finish(start(tmp_path, "--devices", "8", "--block", "rows:8")), 8)


def check_report(out: Path, printed: str, devices: int) -> None:
    before, after, bigram = held_out(printed)
    assert before == pytest.approx(8, abs=1e-3)
    assert after < 5.5
    assert 3 < bigram < 4.5
    assert f"{devices} shards" in printed
    assert "blocks/0" in printed
    assert printed.count("-> b") == 3
    for name in ("layout.png", "loss.png"):
        picture = (out / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000


@pytest.mark.deep
def test_moves_to_torch_and_back(tmp_path):
    """Ten steps in JAX, PyTorch and JAX: the losses are those of the run that stays."""
    pytest.importorskip("torch", reason="the torch extra is not installed")
    out = tmp_path / "run"
    command = [sys.executable, "examples/exchange_with_torch.py", "--steps", "10", "--out", str(out)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=500)
    moved, stayed = np.loadtxt(out / "exchange.csv").T
    np.testing.assert_allclose(moved, stayed, rtol=1e-3)
    assert len(moved) == 30
    assert moved[-1] < 5
    assert (out / "exchange.png").read_bytes().startswith(b"\x89PNG")


def test_the_guide_shows_the_whole_program():
    program = (ROOT / "examples" / "train_complete.py").read_text()
    assert f"\n```python\n{program}```\n" in (ROOT / "docs" / "guide.md").read_text()


@pytest.mark.deep
def test_the_whole_program_goes_on_with_other_devices(tmp_path, monkeypatch):
    """As the run that keeps its devices does, but for rounding."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from train_complete import main

    stayed = main(13, tmp_path, 4)
    assert stayed[-1] < stayed[0]
    shutil.rmtree(tmp_path / "step_00000013")
    moved = main(13, tmp_path, 3)
    np.testing.assert_allclose(moved, stayed[10:], rtol=1e-4)


def test_killed_and_resumed_as_if_it_had_never_stopped(learnt, tmp_path):
    killed, saved = start(tmp_path, *ODD, "--save-every", "2"), tmp_path / "checkpoints"
    try:
        while not (saved / "step_00000002").exists():
            assert killed.poll() is None
            time.sleep(0.01)
    finally:
        killed.kill()
        killed.communicate()
    [resumed] = finish(start(tmp_path, *ODD, "--resume"))
    assert "going on from step" in resumed
    assert np.loadtxt(tmp_path / "loss.csv").tolist() == np.loadtxt(learnt[0] / "loss.csv").tolist()


SHORT = ("--devices", "4", "--steps", "10")


@pytest.mark.deep
def test_two_processes_are_as_good_as_one(tmp_path_factory, tmp_path):
    alone = tmp_path_factory.mktemp("alone")
    [by_one] = finish(start(alone, *SHORT))
    [both] = finish(start(tmp_path, *SHORT, "--save-every", "4", "--processes", "2"))
    two, one = (np.loadtxt(out / "loss.csv") for out in (tmp_path, alone))
    np.testing.assert_allclose(two, one, rtol=1e-4)
    assert held_out(both) == pytest.approx(held_out(by_one), abs=2e-3)
    [resumed] = finish(start(tmp_path, "--devices", "3", "--batch", "12", "--steps", "10", "--resume"))
    assert "going on from step 8" in resumed
    losses = np.loadtxt(tmp_path / "loss.csv")
    assert losses[:8].tolist() == two[:8].tolist()
    assert len(losses) == 10
    assert held_out(resumed)[1] == pytest.approx(held_out(by_one)[1], abs=0.2)


def test_a_wrong_block_is_explained(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from train_gpt import Config, main

    with pytest.raises(SystemExit, match="--block 'tile:3,5' is not a block; write tile:3x5"):
        main(Config(block="tile:3,5"))


@pytest.mark.deep
def test_own_text(tmp_path):
    [printed] = finish(start(tmp_path, "--data", "LICENSE", "--devices", "2", "--steps", "1"))
    assert "bytes to train on: LICENSE" in printed
