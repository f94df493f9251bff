"""What elastix.store offers, and what it does not drag in."""

import subprocess
import sys

import elastix.store


def test_all_is_there() -> None:
    assert elastix.store.__all__ == sorted(elastix.store.__all__)
    for name in elastix.store.__all__:
        assert getattr(elastix.store, name).__doc__


def test_a_store_needs_no_ray() -> None:
    code = "import sys, elastix.store, elastix.cli; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
