"""What a cloud's metadata service says about the machine it is asked on: does it have to go soon?

The service is asked only if a user wants that (FailureConfig.notices). Its answers are taken for
hints: whatever is not exactly what the vendor documents, is slow or is far too long counts as no
news, and what was known before stays. No proxy is asked, no redirect is followed.

Not taken for a notice, since they set no deadline: AWS's rebalance recommendation, a live migration
on Google Cloud, and a "Freeze" of some seconds on Azure.

Sources: docs.aws.amazon.com, EC2, "Spot Instance interruption notices", "Use IMDSv2";
cloud.google.com, Compute Engine, "Spot VMs", "Query metadata server for maintenance event notices";
learn.microsoft.com, Azure, "Scheduled Events for Linux VMs".
"""

import contextlib
import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

EVERY_S = 5.0
"""Seconds from one question to the next; the shortest notice of the three is 30 seconds."""

_ADDRESS = "http://169.254.169.254"
_TIMEOUT_S = 2.0
_MOST_BYTES = 65536
_TOKEN_S = 21600
_AWS_GOES = ("terminate", "stop", "hibernate")
_AZURE_GOES = ("Preempt", "Terminate", "Reboot", "Redeploy")


class NoAnswer(Exception):
    """The service did not say anything that can be understood."""


class Service:
    """One cloud's service, from this machine.

    Args:
        cloud: "aws", "gcp" or "azure".
        address: of the service, if it is not the vendor's own.
    """

    def __init__(self, cloud: str, address: str | None = None) -> None:
        self._address = address or _ADDRESS
        self._ask: Callable[[], bool] = {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}[
            cloud
        ]
        self._cloud = cloud
        self._token = ""
        self._going = False
        self._silent = False

    def going(self) -> bool:
        """Whether this machine is to go, as far as is known. Takes some seconds at most."""
        try:
            self._going = self._ask()
            self._silent = False
        except (NoAnswer, OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            self._token = ""  # it may be that which was no answer
            if not self._silent:
                logger.warning("no notice can be had cloud=%s error=%r", self._cloud, error)
            self._silent = True
        return self._going

    # ------------------------------------------------------------------ the three clouds

    def _aws(self) -> bool:
        """A session token first (IMDSv2); 404 means that nothing is planned."""
        status, text = 401, ""
        for _ in range(2):  # a token is void after six hours
            if not self._token:
                header = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
                status, token = self._call("PUT", "/latest/api/token", header)
                self._token = _line(status, token)
            header = {"X-aws-ec2-metadata-token": self._token}
            path = "/latest/meta-data/spot/instance-action"
            status, text = self._call("GET", path, header)
            if status != 401:
                break
            self._token = ""
        return status != 404 and _mapping(status, text).get("action") in _AWS_GOES

    def _gcp(self) -> bool:
        header = {"Metadata-Flavor": "Google"}
        base = "/computeMetadata/v1/instance"
        if _line(*self._call("GET", f"{base}/preempted", header)) == "TRUE":
            return True
        event = _line(*self._call("GET", f"{base}/maintenance-event", header))
        return event == "TERMINATE_ON_HOST_MAINTENANCE"

    def _azure(self) -> bool:
        """Events are those of all machines of a set, by name."""
        header = {"Metadata": "true"}
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        events = _mapping(*self._call("GET", path, header)).get("Events")
        if not isinstance(events, list):
            raise NoAnswer(f"no list of events: {events!r}")
        goes = [
            machine
            for event in events
            if isinstance(event, dict)
            and event.get("EventType") in _AZURE_GOES
            and isinstance(event.get("Resources"), list)
            for machine in event["Resources"]
        ]
        if not goes:
            return False
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        return _line(*self._call("GET", path, header)) in goes

    # ------------------------------------------------------------------ asking

    def _call(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        """Status and text of one answer.

        Raises:
            NoAnswer: it is too long.
            OSError, HTTPException: nobody answers, or too slowly.
            ValueError: it is no text.
        """
        parts = urlsplit(self._address)
        host, port = parts.hostname or "", parts.port
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.connect()
            # A timeout of the socket's is for each byte; this one is for all of them.
            end = threading.Timer(_TIMEOUT_S, _shut, [connection.sock])
            end.start()
            try:
                connection.request(method, path, headers=dict(headers))
                answer = connection.getresponse()
                text = answer.read(_MOST_BYTES + 1)
            finally:
                end.cancel()
        if len(text) > _MOST_BYTES:
            raise NoAnswer(f"more than {_MOST_BYTES} bytes")
        return answer.status, text.decode()


def _shut(line: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        line.shutdown(socket.SHUT_RDWR)


def _line(status: int, text: str) -> str:
    """A short answer of one word."""
    found = text.strip()
    if status != 200 or not found or len(found) > 256 or not found.isprintable() or "<" in found:
        raise NoAnswer(f"status {status}: {found[:80]!r}")
    return found


def _mapping(status: int, text: str) -> dict[str, Any]:
    """An answer in JSON."""
    found = json.loads(text) if status == 200 else None
    if not isinstance(found, dict):
        raise NoAnswer(f"status {status}: {text[:80]!r}")
    return found
