"""`elastix serve`: the pages of a store in a browser of the same machine, live and read-only.

It listens on the loopback interface alone, and answers only those who have the token that it
prints: other users of the machine may connect to any of its ports. A name that is not this
machine's own is refused, or another site could have its own name resolved to 127.0.0.1. Pages ask
for their data again; none loads anything from elsewhere.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from elastix.errors import ConfigError, ElastixError, NotFound
from elastix.report.page import Page, figures_of, render
from elastix.report.site import Site

HOST = "127.0.0.1"
_COOKIE = "elastix_token"
_NAMES = {"127.0.0.1", "localhost"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Maker = tuple[Callable[[], Page], str]  # of a page, and the run whose files it changes with


def application(site: Site, token: str) -> web.Application:
    """The site, for whoever has the token."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.url.host not in _NAMES:
            return web.Response(status=403, text="This is served to its own machine alone.")
        given = request.query.get("token")
        if given is not None and secrets.compare_digest(given.encode(), token.encode()):
            answer = web.Response(status=303, headers={"Location": request.path})
            answer.set_cookie(_COOKIE, token, httponly=True, samesite="Strict", path="/")
            return answer  # so that the token does not stay in the address
        known = request.cookies.get(_COOKIE, "")
        if not secrets.compare_digest(known.encode(), token.encode()):
            return web.Response(status=403, text="Open the address that `elastix serve` printed.")
        try:
            answer_ = await handler(request)
        except (NotFound, ConfigError) as error:
            return web.Response(status=404, text=str(error))
        except ElastixError as error:
            return web.Response(status=500, text=str(error))
        answer_.headers["Cache-Control"] = "no-store"
        answer_.headers["X-Content-Type-Options"] = "nosniff"
        answer_.headers["Referrer-Policy"] = "no-referrer"
        return answer_

    pages = _Pages(site)
    app = web.Application(middlewares=[guard])
    for path in ("/", "/run/{name}", "/models", "/model/{ref}"):
        app.router.add_get(path, pages.page)
    for path in ("/data/", "/data/run/{name}", "/data/models", "/data/model/{ref}"):
        app.router.add_get(path, pages.data)
    return app


def serve(site: Site, port: int, told: Callable[[str], None]) -> None:
    """Serve until Ctrl-C.

    Args:
        site: what is served.
        port: 0 for one that is free.
        told: is given the address, with the token in it.

    Raises:
        ConfigError: the port is taken.
    """
    token = secrets.token_urlsafe(24)

    def tell(there: int) -> None:
        told(f"http://{HOST}:{there}/?token={token}")

    asyncio.run(listen(application(site, token), HOST, port, f"port {port}", tell))


async def listen(
    app: web.Application, host: str, port: int, where: str, told: Callable[[int], None]
) -> None:
    """Answer until the task is cancelled.

    Args:
        app: what answers.
        host: under which name or address.
        port: 0 for one that is free.
        where: the same in words, for an error.
        told: is given the port, once it is open.

    Raises:
        ConfigError: the port is taken.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except (OSError, UnicodeError) as error:  # a host can be no name at all
            raise ConfigError(
                f"{where} cannot be listened on: {error}. Nothing is served. Name another one "
                "with --port, or 0 for one that is free."
            ) from error
        told(runner.addresses[0][1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _is_ours(record: logging.LogRecord) -> bool:
    """What strangers send that is no HTTP is answered with 400, and is no error of this program."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


class _Pages:
    """Makes pages in a thread, one at a time: a long journal takes a while to read."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = asyncio.Lock()
        self._made: dict[str, tuple[str, Page]] = {}  # by path: the version, and the page

    async def page(self, request: web.Request) -> web.Response:
        """The whole page."""
        version, page = await self._make(request.path, request)
        source = f"/data{request.path}"
        text = await asyncio.to_thread(render, page, source=source, version=version)
        return web.Response(text=text, content_type="text/html")

    async def data(self, request: web.Request) -> web.Response:
        """What has changed since the version `seen`: 204 if nothing has."""
        path = request.path.removeprefix("/data")
        version, page = await self._make(path, request)
        if request.query.get("seen") == version:
            return web.Response(status=204)
        html = await asyncio.to_thread(render, page, source=request.path)
        body = {"version": version, "html": _body(html), "figures": json.loads(figures_of(page))}
        return web.json_response(body)

    async def _make(self, path: str, request: web.Request) -> tuple[str, Page]:
        make, name = self._maker(request)
        async with self._lock:
            version = await asyncio.to_thread(self._site.version, name)
            known = self._made.get(path)
            if known is None or known[0] != version:
                if len(self._made) > 32:
                    self._made.clear()
                known = self._made[path] = (version, await asyncio.to_thread(make))
            return known

    def _maker(self, request: web.Request) -> Maker:
        name, ref = request.match_info.get("name"), request.match_info.get("ref")
        if name is not None:
            return lambda: self._site.run(name), name
        if ref is not None:
            return lambda: self._site.model(ref), ""
        return (self._site.models if request.path.endswith("/models") else self._site.runs), ""


def _body(html: str) -> str:
    """Without the scripts, which the page has already."""
    start, end = html.index("<body>"), html.index('<script type="application/gzip" id="figures">')
    return html[start:end]
