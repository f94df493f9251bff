"""A worker is killed that has DataLoader processes: these go with it, and its sockets with them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READS = """
import os, signal, torch
from torch.utils.data._utils import worker
from elastix.data.loader import Loader
from elastix.data.source import Source
from tests.unit.data.test_loader import Numbers, Pace

worker.MP_STATUS_CHECK_INTERVAL = 3600.0  # torch's own look for a parent that is gone
source = Source(dataset=Numbers(64), batch_size=4, num_workers=2, device=torch.device("cpu"))
loader = Loader(0, source, Pace())
epoch = next(iter(loader.epochs(1)))
next(iter(epoch))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_the_processes_of_a_loader_end_with_the_worker_that_is_killed():
    """They have its standard output too, which is at its end when the last of them is gone."""
    said = subprocess.run(
        [sys.executable, "-c", READS], cwd=ROOT, stdout=subprocess.PIPE, timeout=250, check=False
    )
    assert said.returncode == -9
