"""Ray, as a driver finds or starts it if its user has not."""

import logging
import os
import socket

import ray
from ray._private.utils import read_ray_address


def find_or_start_ray() -> None:
    """Use the Ray that runs on this host, or start a local one.

    Ray notes in a file where the host's cluster is. Where that has ended without taking the note
    away, ray.init() waits for it for minutes. Here one that no connection can be made to is gone.
    """
    gone = not os.environ.get("RAY_ADDRESS") and _is_gone(read_ray_address())
    ray.init("local" if gone else None, logging_level=logging.WARNING)


def _is_gone(noted: str | None) -> bool:
    host, _, port = (noted or "").rpartition(":")
    if not port.isdigit():
        return False  # nothing is noted, or nothing that is known here: Ray knows what to do
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError:
        return True
    return False
