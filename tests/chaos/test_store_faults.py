"""Law 2: every write, sync, rename and open may fail: typed errors, and the store stays whole."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the library that makes system calls fail")
    target = tmp_path_factory.mktemp("library") / "faults.so"
    source = HERE / "store_faults.c"
    flags = ["-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-U_FILE_OFFSET_BITS"]
    subprocess.run([compiler, *flags, "-o", target, source, "-ldl"], check=True)
    return target


def test_every_fourth_system_call_fails(tmp_path: Path, library: Path) -> None:
    fail_calls(tmp_path / "store", library, stride=4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_system_call_fails_once_and_for_good(tmp_path: Path, library: Path) -> None:
    print(fail_calls(tmp_path / "store", library, stride=1))


def fail_calls(root: Path, library: Path, stride: int) -> dict[str, int]:
    env = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.store_faults", str(root), str(stride)],
        env=env,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    for name in ("put", "begin", "tag", "retire", "open", "gc"):
        assert outcomes[f"{name} EIO StoreError"] >= 2
        assert outcomes[f"{name} ENOSPC Full"] >= 2
    for name in ("begin", "read", "open", "gc"):
        assert outcomes[f"{name} EMFILE StoreError"] >= 1
    return dict(outcomes)
