"""The doctor beside a real Ray: one that answers, and one that wants another token."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)


def examine(tmp_path, **environment):
    done = subprocess.run(
        [Path(sys.executable).parent / "elastix", "doctor", "--json", "--store", str(tmp_path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    return done.returncode, found["ray cluster"]


def test_a_cluster_that_answers(cluster, tmp_path):
    address = cluster.get_runtime_context().gcs_address
    code, found = examine(tmp_path, RAY_ADDRESS=address)
    assert found["status"] == "ok", found
    assert address in found["fact"]
    assert "1 nodes" in found["fact"]
    assert "of 8 CPU" in found["fact"]
    assert code == 0


def test_a_cluster_that_wants_another_token(cluster, tmp_path):
    address = cluster.get_runtime_context().gcs_address
    code, found = examine(
        tmp_path, RAY_ADDRESS=address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="f" * 64
    )
    assert found["status"] == "fail", found
    assert "the same token" in found["mend"]
    assert code == 1
