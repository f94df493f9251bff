"""The driver's view of a run: events as they come, through the death of the controller."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError

from elastix.errors import ControllerLost
from elastix.events import Event
from elastix.observe.console import Console
from elastix.train.control.interruption import MOMENT_S
from elastix.train.on_ray.controller import Followed

_STOP_S = 40.0  # to store the State, and to end
_ASK_S = 1.0
_ANSWER_S = 30.0
_RESTART_S = 300.0
_AGAIN_S = 0.1


class DriverView:
    """Shows a run's events as they come.

    Args:
        controller: its handle.
        console: shows them.
        watch: is handed them, too.
    """

    def __init__(
        self,
        controller: Any,  # noqa: ANN401 - a handle
        console: Console,
        watch: Callable[[Sequence[Event]], None] | None = None,
    ) -> None:
        self._controller = controller
        self._console = console
        self._watch = watch
        self._seen = 0
        self._ended_by_watch = False

    def follow(self) -> Followed:
        """Show events until the run is over. Blocks.

        Raises:
            ControllerLost: the controller was ended for good, or does not come back.
        """
        away_since: float | None = None
        heard = False
        while True:
            try:
                news = self._look()
            except ActorDiedError as error:
                raise ControllerLost(
                    f"the controller of the run was ended for good: {error} The workers end by "
                    "themselves. Calling fit() again goes on from the last stored State."
                ) from error
            except (RayActorError, GetTimeoutError) as error:
                now = time.monotonic()
                if away_since is None:
                    away_since = now
                    if heard or isinstance(error, RayActorError):  # else it may be slow to start
                        self._console.leaderless()
                self._console.tick()
                if now - away_since > _RESTART_S:
                    raise ControllerLost(
                        f"the controller died and did not come back within {_RESTART_S:.0f} s: "
                        f"{error} The workers end by themselves when it is ended. Look at Ray's "
                        "logs for why it cannot start. Calling fit() again goes on from the last "
                        "stored State."
                    ) from error
                time.sleep(_AGAIN_S)
                continue
            except RayError as error:
                raise ControllerLost(
                    f"the controller of the run cannot be asked: {error} Look at Ray's logs. "
                    "Calling fit() again goes on from the last stored State."
                ) from error
            away_since, heard = None, True
            if news.over:
                return news

    def stop(self, reason: str) -> Followed | None:
        """Interrupt the run, and show events until its State is stored and it has ended.

        Through the death of the controller. Ctrl-C meanwhile ends the waiting, unless it is the
        one that has led here, passed on by another program.

        Returns:
            How it ended; None if that was not heard.
        """
        began = time.monotonic()
        told = asked = False
        while (left_s := began + _STOP_S - time.monotonic()) > 0:
            try:
                if not told:
                    self._console.stopping()
                    told = True
                asked = asked or ask_to_stop(self._controller, reason, left_s)
                if (news := self._look()).over:
                    return news
            except KeyboardInterrupt:
                if self._ended_by_watch or time.monotonic() - began > MOMENT_S:
                    raise
            except ActorDiedError:
                return None
            except (RayActorError, GetTimeoutError):  # Ray starts it anew, and it goes on with this
                time.sleep(_AGAIN_S)
            except RayError:
                return None
        return None

    def _look(self) -> Followed:
        """What is new; waits a moment for something."""
        asked = self._controller.follow.remote(self._seen, _ASK_S)
        news: Followed = ray.get(asked, timeout=_ANSWER_S)
        self._seen += len(news.events)
        for event in news.events:
            self._console.show(event)
        self._console.tick()
        if self._watch is not None:
            try:
                self._watch(news.events)
            except KeyboardInterrupt:
                self._ended_by_watch = True
                raise
        return news


def ask_to_stop(controller: Any, reason: str, within_s: float) -> bool:  # noqa: ANN401 - a handle
    """Ask for the end of a run, once; False if its controller does not answer in time.

    One that dies may have heard it, and noted it, or not: its successor says which.

    Raises:
        ActorDiedError: there is no successor.
    """
    deadline, perhaps = time.monotonic() + within_s, False
    while time.monotonic() < deadline:
        try:
            if not (perhaps and _ends(controller)):
                ray.get(controller.stop.remote(reason), timeout=_ANSWER_S)
        except ActorDiedError:
            raise
        except (RayActorError, GetTimeoutError):
            perhaps = True
            time.sleep(_AGAIN_S)
        else:
            return True
    return False


def _ends(controller: Any) -> bool:  # noqa: ANN401 - a handle
    status = ray.get(controller.status.remote(), timeout=_ANSWER_S)
    return bool(status["stopping"] or status["over"])


def is_over(controller: Any) -> bool:  # noqa: ANN401 - a handle
    """Whether its run has ended, well or not; False also if it does not answer in time.

    One that is being stopped is waited for.
    """
    try:
        while True:
            status = ray.get(controller.status.remote(), timeout=_ANSWER_S)
            if status["over"] or not status["stopping"]:
                return bool(status["over"])
            time.sleep(_AGAIN_S)
    except ActorDiedError:
        return True
    except (RayActorError, GetTimeoutError):
        return False  # Ray starts it anew
