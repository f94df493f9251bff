"""Who tells of a dead worker: elastix of its own, Ray of everybody else's, and nobody twice."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_tells_of_the_deaths_of_others_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.deaths_driver", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    strangers = json.loads(done.stdout.splitlines()[-1])
    told = re.findall(r"A worker died or was killed.*Worker PID: (\d+)", done.stdout + done.stderr)
    assert sorted(map(int, told)) == sorted(strangers)
    lossy = done.stdout[done.stdout.index("lossy starts") : done.stdout.index("lossy finished")]
    assert re.search(r"worker 1 lost \(rank \d, died\)", lossy)
    assert re.search(r"trial \d+ lost: worker \d+ died", done.stdout)
