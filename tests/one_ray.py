"""A command with one Ray for all that it starts: `python -m tests.one_ray COMMAND...`.

Each example would start a Ray of its own, which takes ten seconds of a core, and Python anew for
each worker. Here workers are forked, see forked_workers. Whoever takes RAY_ADDRESS out of its
environment starts its own Ray as ever.
"""

import logging
import os
import subprocess
import sys

import ray

from tests import forked_workers

CPUS = 6
"""Of three examples at once: each has enough with the two that the smallest machine has."""


def main(command: list[str]) -> int:
    """Its exit status."""
    with forked_workers.serve():
        ray.init(
            address="local",
            num_cpus=CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _system_config=forked_workers.SETTINGS,
        )
        try:
            address = ray.get_runtime_context().gcs_address
            return subprocess.run(command, env={**os.environ, "RAY_ADDRESS": address}).returncode
        finally:
            ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
