"""A model of a store behind HTTP, which follows its tag. JSON in, JSON out.

    POST /predict  {"inputs": [...]}  ->  {"ref": "...", "outputs": [...]}
    GET /          which model answers now, since when, and what went wrong when it last looked

A request is answered by one model from its beginning to its end: a newer one is loaded beside it
and takes its place in one assignment. What cannot be loaded is told of and changes nothing.

A page of another site in a browser of this machine can send no JSON without asking first, and is
never allowed to: other types of content are refused. Nor is a name answered to that is not this
machine's own while it listens to this machine alone: such a site could have its name resolved here.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import torch
from aiohttp import web
from torch.utils._pytree import tree_map_only

from elastix.commands.built_model import built_model, first_line, without_cache
from elastix.commands.output import strict
from elastix.errors import ConfigError, ElastixError
from elastix.report.serving import listen
from elastix.state import Ref
from elastix.store import Store

HOST = "127.0.0.1"
MOST_BYTES = 64 * 1024**2  # of one request
_AGAIN_S, _AGAIN_AT_MOST_S = 2.0, 60.0  # until what failed is tried again: twice as long each time
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class _Loaded:
    """A model, and what it is."""

    ref: Ref
    module: torch.nn.Module
    since: float


@dataclass
class _Refused:
    """A model that could not be loaded, and when it is tried again: its State may be large."""

    ref: Ref
    why: str
    again_s: float
    pause_s: float = _AGAIN_S


class ServedModel:
    """What a name of a store means, as a model; another one as soon as the name means another.

    Args:
        store: to look in; it is opened anew each time, so nothing of it is held.
        name: a tag or ref.
        model, config: what builds the module; see `built_model`. Without a config, that of the
            stored trial is used.
        dtype: of inputs.

    Raises:
        ElastixError: there is no such model, or it cannot be built.
    """

    def __init__(
        self, store: str, name: str, model: str, config: str | None, dtype: torch.dtype
    ) -> None:
        self.name = name
        self.failure = ""
        self._store, self._model, self._config, self._dtype = store, model, config, dtype
        self._refused: _Refused | None = None
        self._now = self._load(self._meant())

    @property
    def ref(self) -> Ref:
        """Which model answers now."""
        return self._now.ref

    def refresh(self) -> bool:
        """Look what the name means, and load it if that is another model. Blocks. One at a time.

        Returns:
            Whether another model answers from now on.
        """
        before, refused = self._now, self._refused
        ref: Ref | None = None
        try:
            ref = self._meant()
            if refused is not None and refused.ref == ref and time.monotonic() < refused.again_s:
                self.failure = refused.why
                return False
            if ref != before.ref:
                self._now = self._load(ref)
            self.failure, self._refused = "", None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model that answers goes on
            known = isinstance(error, ElastixError)
            self.failure = str(error) if known else f"{type(error).__name__}: {error}"
            if ref is not None:
                pause_s = _AGAIN_S
                if refused is not None and refused.ref == ref:
                    pause_s = min(2 * refused.pause_s, _AGAIN_AT_MOST_S)
                self._refused = _Refused(ref, self.failure, time.monotonic() + pause_s, pause_s)
        return self._now is not before

    def _meant(self) -> Ref:
        with Store(self._store, read_only=True) as opened:
            return opened.manifest(self.name).ref

    def _load(self, ref: Ref) -> _Loaded:
        with Store(self._store, read_only=True) as opened:
            state = opened.get(ref)
            config = state.meta.get("config") if self._config is None else self._config
            module = state.load_into(built_model(self._model, config))
        without_cache(module)
        return _Loaded(ref, module, time.time())

    def answer(self, inputs: Any) -> str:  # noqa: ANN401 - any JSON
        """What the model says of a batch: a nested list, of which the first index counts samples.

        Returns:
            JSON, with null where a number is not finite.

        Raises:
            ConfigError: it is no batch, or the model does not take it.
        """
        now = self._now
        try:
            if not self._dtype.is_floating_point and torch.tensor(inputs).is_floating_point():
                raise ConfigError(f"inputs have fractions, and this model takes {self._dtype}.")
            batch = torch.tensor(inputs, dtype=self._dtype)
        except ConfigError:
            raise
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(f"inputs are no tensor: {first_line(error)}.") from error
        if not batch.ndim or not len(batch):
            raise ConfigError("inputs are a list of at least one sample.")
        try:
            with torch.no_grad():
                found = now.module(batch)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"the model does not take inputs of shape {tuple(batch.shape)}: {first_line(error)}"
            ) from error
        plain = tree_map_only(torch.Tensor, torch.Tensor.tolist, found)
        try:
            return json.dumps(strict({"ref": now.ref, "outputs": plain}), allow_nan=False)
        except TypeError as error:
            raise ConfigError(f"the model answers with what is no tensor: {error}") from error

    def about(self) -> dict[str, Any]:
        """Which model answers."""
        now = self._now
        return {"name": self.name, "ref": now.ref, "since": now.since, "failure": self.failure}


def application(served: ServedModel, host: str = HOST) -> web.Application:
    """The two addresses. One request is computed at a time; the others wait."""
    own = own_names(host)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            name = request.url.host
        except ValueError as error:
            return _refused(400, f"the Host header is no name: {error}")
        if own and name not in own:
            return _refused(403, "this is served to its own machine alone")
        return await handler(request)

    worker = ThreadPoolExecutor(1, "model")

    async def about(_request: web.Request) -> web.Response:
        return web.json_response(served.about())

    async def predict(request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            return _refused(415, "send JSON: Content-Type: application/json")
        try:
            asked = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            return _refused(400, f"that is no JSON: {error}")
        if not isinstance(asked, dict) or "inputs" not in asked:
            return _refused(400, 'send {"inputs": [sample, ...]}')
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                worker, served.answer, asked["inputs"]
            )
        except ConfigError as error:
            return _refused(422, str(error))
        return web.Response(text=found, content_type="application/json")

    app = web.Application(middlewares=[guard], client_max_size=MOST_BYTES)
    app.router.add_get("/", about)
    app.router.add_post("/predict", predict)

    async def close(_app: web.Application) -> None:
        worker.shutdown(wait=False, cancel_futures=True)

    app.on_cleanup.append(close)
    return app


def own_names(host: str) -> set[str]:
    """How this machine may be called if it listens to itself alone; empty if to others too."""
    try:
        found = {str(place[4][0]) for place in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # nor can it be listened on, which says so
        return set()
    alone = all(ip_address(address).is_loopback for address in found)
    return {"localhost", host.lower(), *found} if alone else set()


def address_of(host: str, port: int) -> str:
    """Where it answers, for people and for curl."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _refused(status: int, why: str) -> web.Response:
    return web.json_response({"error": why}, status=status)


@contextmanager
def following(
    served: ServedModel, every_s: float, told: Callable[[str], None]
) -> Iterator[threading.Thread]:
    """Meanwhile look every so often what the name means; `told` hears of what came of it."""
    over = threading.Event()

    def tell(text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed: goes on
            told(text)

    def follow() -> None:
        said = ""
        while not over.wait(every_s):
            if served.refresh():
                tell(f"{served.name} is {served.ref[:12]} now")
            if served.failure != said:
                said = served.failure
                if said:
                    tell(f"{served.ref[:12]} goes on answering: {said}")

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        over.set()


def serve(served: ServedModel, host: str, port: int, told: Callable[[str], None]) -> None:
    """Answer until Ctrl-C.

    Raises:
        ConfigError: the port is taken.
    """

    def tell(there: int) -> None:
        told(address_of(host, there))

    asyncio.run(listen(application(served, host), host, port, f"{host}:{port}", tell))
