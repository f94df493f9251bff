"""What a trial sets in its process, and the next one must not find: folder, environment, settings.

What a module sets while it is imported stays: it is imported once, and later trials find it as the
first one does. Not here: models and random numbers that trials find outside of themselves.
"""

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.modules.module as hooks_of_modules
import torch.optim.optimizer as hooks_of_optimizers

from elastix.search.executors.entered_contexts import CONTEXTS

_TO_RETURN = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY  # without the right to read it
_DEVICES = ("cpu", "cuda")
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD")

Get = Callable[[], Any]
Put = Callable[[Any], object]


def _flags(of: Any, *names: str) -> Iterator[tuple[Get, Put]]:  # noqa: ANN401
    for name in names:
        if hasattr(of, name):
            yield partial(getattr, of, name), partial(setattr, of, name)


def _set_default_device(device: torch.device) -> None:
    """The CPU is the default without any, and then no operator looks for one."""
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_warnings(filters: list[Any]) -> None:
    warnings.resetwarnings()  # which also forgets what was shown under the others
    warnings.filters.extend(filters)  # type: ignore[attr-defined]


def _keeps_denormals() -> bool:
    return bool(np.float32(1e-40) * np.float32(1))


def _set_anomaly(enabled: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(*enabled)


def _loggers() -> dict[str, tuple[Any, ...]]:
    """By name, what each is set to; without those that are as they were made."""
    return {
        name: (one.level, one.propagate, one.disabled, tuple(one.handlers), tuple(one.filters))
        for name, one in _every_logger()
        if one.level or one.handlers or one.filters or one.disabled or not one.propagate
    }


def _every_logger() -> Iterator[tuple[str, logging.Logger]]:
    yield "root", logging.root
    for name, one in logging.root.manager.loggerDict.copy().items():
        if isinstance(one, logging.Logger):
            yield name, one


def _set_loggers(kept: dict[str, tuple[Any, ...]]) -> None:
    """All others are as if they had just been made."""
    for name, one in _every_logger():
        level, propagate, disabled, handlers, filters = kept.get(name, (0, True, False, (), ()))
        one.setLevel(level)
        one.propagate, one.disabled = propagate, disabled
        one.handlers[:], one.filters[:] = handlers, filters


def _set_path(folders: list[str]) -> None:
    sys.path[:] = folders  # of whatever list that is by now


def _is_timed() -> bool:
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0


def _set_timed(was: bool) -> None:
    """End a timer that a trial has left: its signal would come to whoever runs then."""
    if not was:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _is_in_a_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _set_in_a_process_group(was: bool) -> None:
    """End one that a trial has left: a second one is refused."""
    if not was:
        with suppress(Exception):  # whatever is left of it, the trial is over
            dist.destroy_process_group()


def _signal_handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}  # nobody can set one there
    return {
        number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, _SIGNALS)
    }


def _set_signal_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _hooks(of: ModuleType) -> dict[str, dict[Any, Any]]:
    """By name, those that are called for all modules, or all optimizers, that there are."""
    return {
        name: dict(value)
        for name, value in vars(of).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }


def _set_hooks(of: ModuleType, hooks: dict[str, dict[Any, Any]]) -> None:
    for name, kept in hooks.items():
        there = getattr(of, name)
        there.clear()
        there.update(kept)


def _set_sparse_checks(enabled: bool) -> None:
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    (checks.enable if enabled else checks.disable)()


_backends: Any = torch.backends
_OF_PRECISION = [
    _backends,  # first: others may follow it
    _backends.cuda.matmul,
    *(
        of
        for library in (_backends.cudnn, _backends.mkldnn)
        for of in (library, *(getattr(library, name, None) for name in ("matmul", "conv", "rnn")))
    ),
]
_SETTINGS: tuple[tuple[Get, Put], ...] = (
    *CONTEXTS,
    (torch.get_default_device, _set_default_device),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *_flags(torch.utils.deterministic, "fill_uninitialized_memory"),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), _set_anomaly),
    *(
        (partial(get, device), partial(put, device))
        for device in _DEVICES
        for get, put in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_keeps_denormals, lambda kept: torch.set_flush_denormal(not kept)),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *(pair for of in _OF_PRECISION for pair in _flags(of, "fp32_precision")),
    (torch.sparse.check_sparse_tensor_invariants.is_enabled, _set_sparse_checks),
    *_flags(_backends.cudnn, "enabled", "benchmark", "benchmark_limit", "deterministic"),
    *_flags(_backends.cudnn, "allow_tf32"),
    *_flags(_backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    *_flags(_backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    *_flags(_backends.cuda.matmul, "allow_fp16_accumulation"),
    (_backends.cuda.flash_sdp_enabled, _backends.cuda.enable_flash_sdp),
    (_backends.cuda.mem_efficient_sdp_enabled, _backends.cuda.enable_mem_efficient_sdp),
    (_backends.cuda.math_sdp_enabled, _backends.cuda.enable_math_sdp),
    (_backends.cuda.cudnn_sdp_enabled, _backends.cuda.enable_cudnn_sdp),
    *_flags(_backends.mkldnn, "enabled", "deterministic"),
    (_backends.mha.get_fastpath_enabled, _backends.mha.set_fastpath_enabled),
    *_flags(_backends.quantized, "engine"),
    (
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
    ),
    (
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ),
    *_flags(torch.distributions.Distribution, "_validate_args"),
    *(
        (partial(_hooks, of), partial(_set_hooks, of))
        for of in (hooks_of_modules, hooks_of_optimizers)
    ),
    (_is_in_a_process_group, _set_in_a_process_group),
    (gc.isenabled, lambda was: (gc.enable if was else gc.disable)()),
    (gc.get_threshold, lambda kept: gc.set_threshold(*kept)),
    (np.geterr, lambda kept: np.seterr(**kept)),
    (lambda: list(warnings.filters), _set_warnings),
    (_loggers, _set_loggers),
    (lambda: logging.root.manager.disable, logging.disable),
    (lambda: list(sys.path), _set_path),
    *_flags(sys, "stdout", "stderr"),
    (
        lambda: multiprocessing.get_start_method(allow_none=True) or "",
        lambda kept: multiprocessing.set_start_method(kept or None, force=True),
    ),
    (_is_timed, _set_timed),  # before the handler of its signal goes
    (_signal_handlers, _set_signal_handlers),
)
"""Of this process: how each is read and set."""


def _read(get: Get) -> Any:  # noqa: ANN401 - of any setting
    """None if torch cannot say: of precisions there are older names, and they may not fit."""
    try:
        return get()
    except RuntimeError:
        return None


class _Kept:
    """Settings and the environment, as they are to be when a trial has ended."""

    def __init__(self) -> None:
        self._settings, self._environment = _now()

    def moved(self, before: "_Now", after: "_Now") -> None:
        """What was changed in between stays, unless this trial had changed it before."""
        settings, environment = before[0], before[1]
        for place, (was, now) in enumerate(zip(settings, after[0], strict=True)):
            if was != now:
                self._settings[place] = _merged(self._settings[place], was, now)
        for name in environment.keys() | after[1].keys():
            if environment.get(name) != (value := after[1].get(name)):
                self._environment.pop(name, None)
                if value is not None:
                    self._environment[name] = value

    def put_back(self) -> None:
        """Leave all as it was. What has not changed is not set again: other threads may read."""
        for (get, put), was in zip(_SETTINGS, self._settings, strict=True):
            if was is not None and _read(get) != was:
                put(was)
        kept, zone = self._environment, os.environ.get("TZ")
        for name in os.environ.keys() - kept.keys():
            del os.environ[name]
        for name, value in kept.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if zone != kept.get("TZ"):
            time.tzset()


def _merged(kept: Any, was: Any, now: Any) -> Any:  # noqa: ANN401 - of any setting
    """What is kept, with what was changed between `was` and `now`, and nothing else of either."""
    if isinstance(now, dict):
        changed = {name: value for name, value in now.items() if was.get(name, was) != value}
        return {name: one for name, one in kept.items() if name in now or name not in was} | changed
    if isinstance(now, list):
        still = [one for one in kept if one in now or one not in was]
        old = [place for place, one in enumerate(now) if one in was]
        end = old[0] if old else len(now)
        new = [(place, one) for place, one in enumerate(now) if one not in was]
        before, after = ([one for p, one in new if p < end], [one for p, one in new if p > end])
        return [*before, *still, *after]
    return now


_Now = tuple[list[Any], dict[str, str]]


def _now() -> _Now:
    return [_read(get) for get, _ in _SETTINGS], dict(os.environ)


_lock = threading.Lock()
_under_way: list[_Kept] = []
_told: list[Callable[[ModuleType], None]] = []
_importing = threading.local()


def _execute(loader: SourceFileLoader, module: ModuleType) -> None:
    """In place of SourceFileLoader.exec_module while a trial runs: what the module sets stays."""
    own = super(SourceFileLoader, loader).exec_module
    modules: list[ModuleType] | None = getattr(_importing, "now", None)
    if modules is not None:
        own(module)
        modules.append(module)
        return
    _importing.now, before = [module], _now()
    try:
        own(module)
    finally:
        imported, _importing.now, after = _importing.now, None, _now()
        for kept in _under_way:
            kept.moved(before, after)
        for tell in _told:
            for each in imported:
                tell(each)


@contextmanager
def imports_told(tell: Callable[[ModuleType], None]) -> Iterator[None]:
    """Tell of each module that a trial imports, once it and all that imported it are there."""
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)


@contextmanager
def kept() -> Iterator[None]:
    """Leave the working folder, the environment and all settings as they were.

    What libraries set in C stays: nobody knows it here. Those that set something from Python when
    they are first used, as torch's compiler does for its cache, look for it again.
    """
    with _folder_kept():
        mine = _Kept()
        with _lock:
            _under_way.append(mine)
            SourceFileLoader.exec_module = _execute  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            with _lock:
                _under_way.remove(mine)
                if not _under_way:
                    del SourceFileLoader.exec_module
            mine.put_back()


@contextmanager
def _folder_kept() -> Iterator[None]:
    """Leave the working folder as it was; it may have been renamed or removed meanwhile."""
    try:
        folder = os.open(".", _TO_RETURN)
    except OSError:  # there is none to come back to
        yield
        return
    try:
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)
