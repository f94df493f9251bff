"""What a local run leaves in the folder for temporary files: nothing, once its process is over."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import os, signal, sys
    import torch
    from elastix.testing.local import run_local

    def train(ctx):
        ctx.prepare(torch.nn.Linear(1, 1))
        if ctx.config["raises"]:
            raise ValueError("no such thing")

    if __name__ == "__main__":
        how = sys.argv[1]
        run = run_local(train, 1, config={"raises": how == "raises"})
        assert (run.directory / "journal.jsonl").exists()
        if how == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("how", ["through", "raises", "interrupted"])
def test_a_folder_that_nobody_has_named_goes_with_the_process(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with tempfile.TemporaryDirectory() as there:  # of a short path: sockets lie in it
        environment = {**os.environ, "TMPDIR": there}
        command = [sys.executable, script, how]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        expected = {"through": 0, "raises": 1, "interrupted": -signal.SIGINT}
        assert done.returncode == expected[how], done.stderr
        assert ("no such thing" in done.stderr) == (how == "raises")
        assert not list(Path(there).glob("elastix-local-*"))
