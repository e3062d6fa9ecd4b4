"""Settings of the whole test run."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from dilated_attention_pytorch.kernels import native
from support.browser import CHROMIUM, FLAGS

# Reproducible by default; HYPOTHESIS_PROFILE=search looks for new cases on every run.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("fixed", derandomize=True, database=None, **_common)
settings.register_profile("search", **_common)
# One thread a process: the tests are small, and pytest-xdist runs a process per core.
torch.set_num_threads(1)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
    # The C library keeps blocks below 32 MiB that are freed. To give them back and to ask for them again is a
    # quarter of the time of comparisons with the dense reference. This process only: children measure memory.
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(M_MMAP_THRESHOLD, 2**25)

# What takes longest, much of it in processes of its own. It comes first: a worker of pytest-xdist that is
# done takes over from the end of another's list, and a long test there would leave cores idle.
FIRST = {"bench", "cli", "core", "demo", "docs", "ring", "train"}
FIRST |= {
    "test_exactness.py",
    "test_examples.py",
    "test_project.py",
    "test_triton.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.isdisjoint(item.path.parts))


def pytest_collection_finish() -> None:
    """Exempts what torch and the tests have loaded from the search for garbage, which would last longer."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As if the package had been installed without a C compiler; gives where the library would be."""
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "native.so")
    monkeypatch.delenv("DILATED_ATTENTION_ISA", raising=False)
    native.load_library.cache_clear()
    yield tmp_path / "native.so"
    native.load_library.cache_clear()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed here (Debian and Ubuntu: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    """Fills every `torch.empty` with NaN, so that reading what was never written cannot go unseen."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
