"""Metadata services of three clouds, as their vendors document them, on this machine."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Fake:
    """A server; `reply` says what it answers.

    Attributes:
        calls: methods and paths, in order.
        node_of: tells by its port on which node somebody is who asks.
        askers: nodes on which somebody has asked.
        only: the node that is to go; None: all of which there is a notice.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.broken = False
        self.node_of: Callable[[int], str] = lambda _: ""
        self.askers: set[str] = set()
        self.only: str | None = None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_PUT(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def _answer(self) -> None:
                fake.calls.append((self.command, self.path))
                headers = {name.lower(): value for name, value in self.headers.items()}
                node = fake.node_of(self.client_address[1])
                fake.askers.add(node)
                goes = fake.only in (None, node)
                status, text = fake.reply(self.command, self.path, headers, goes)
                body = text if isinstance(text, bytes) else text.encode()
                if fake.broken:
                    status, body = 200, b"<html>"
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                try:
                    self.wfile.write(body)
                except ConnectionError:
                    self.close_connection = True  # it had heard enough

            def log_message(self, *_arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def asked(self) -> list[str]:
        """Paths, in order."""
        return [path for _, path in self.calls]

    def reply(
        self, method: str, path: str, headers: dict[str, str], goes: bool
    ) -> tuple[int, str | bytes]:
        """Status and text; `goes` says whether a notice is for who asks."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Aws(Fake):
    """EC2 with IMDSv2 alone.

    Attributes:
        action: what is planned; None for nothing.
        tokens: how many were given out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.action: dict[str, str] | None = None
        self.tokens = 0
        self._valid: set[str] = set()

    def forget_tokens(self) -> None:
        """They are no longer valid."""
        self._valid.clear()

    def reply(self, method: str, path: str, headers: dict[str, str], goes: bool) -> tuple[int, str]:
        if path == "/latest/api/token":
            if method != "PUT" or not headers.get("x-aws-ec2-metadata-token-ttl-seconds"):
                return 400, ""
            self.tokens += 1
            self._valid.add(f"token-{self.tokens}")
            return 200, f"token-{self.tokens}"
        token = headers.get("x-aws-ec2-metadata-token")
        if token not in self._valid:
            return 401, ""
        if path == "/latest/meta-data/spot/instance-action" and self.action and goes:
            return 200, json.dumps(self.action)
        return 404, "<html>not found</html>"


class Gcp(Fake):
    """Compute Engine."""

    preempted, event = "FALSE", "NONE"

    def reply(
        self, _method: str, path: str, headers: dict[str, str], goes: bool
    ) -> tuple[int, str]:
        if headers.get("metadata-flavor") != "Google":
            return 403, "<html>Missing Metadata-Flavor:Google header.</html>"
        values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        if goes:
            values = {"preempted": self.preempted, "maintenance-event": self.event}
        name = path.removeprefix("/computeMetadata/v1/instance/")
        return (200, values[name]) if name in values else (404, "<html>not found</html>")


class Azure(Fake):
    """Scheduled events of a scale set."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, *machines: str) -> dict[str, Any]:
        """One that is planned for these."""
        return {
            "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(machines),
            "EventStatus": "Scheduled",
            "NotBefore": "Mon, 19 Sep 2030 18:29:47 GMT",
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }

    def reply(
        self, _method: str, path: str, headers: dict[str, str], goes: bool
    ) -> tuple[int, str]:
        if headers.get("metadata") != "true":
            return 400, ""
        if path.startswith("/metadata/instance/compute/name?"):
            return 200, self.name if goes else "another"
        if path.startswith("/metadata/scheduledevents?api-version="):
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events})
        return 404, ""
