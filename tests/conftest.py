"""Eight virtual CPU devices in this one process, set before the backend starts.

Implicit dtype and rank promotion cannot be errors everywhere, because optax and user models rely on both; the
library's own arithmetic is held to the strict rules in `test_transforms.py`.
"""

import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest
from hypothesis import settings

settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.register_profile("deep", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


collect_ignore = ["checkpoint_killer.py", "two_processes.py", "torch_workers"]  # programs that tests start
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"


def pytest_configure(config):
    """What a test compiled, the others, pytest's other workers and their processes take from a cache of this run."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="compiled-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        jax.config.update("jax_compilation_cache_dir", folder)


def pytest_collection_modifyitems(config, items):
    """What is marked `deep` is a larger grid of what runs anyway."""
    if not DEEP:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("deep")])
        items[:] = [item for item in items if not item.get_closest_marker("deep")]


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """Tests fail, never skip, when the virtual devices are missing."""
    assert jax.device_count() == 8, f"the tests need 8 CPU devices, got {jax.devices()}"
