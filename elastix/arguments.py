"""Whether a call is what its signature asks for, by names and by types, before anything is done.

`checked` is put on every class and function that users call with settings. Not here: whether a
value of the right type makes sense (the class that it belongs to).
"""

import difflib
import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from elastix.errors import ConfigError

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

MOST = 2**63 - 1  # a State and the index of a store hold no larger number
LONGEST_S = 1e9  # thirty years; nobody can wait longer than threading.TIMEOUT_MAX
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "text",
}
_CONFIGURATIONS: dict[str, Sequence[str]] = {}  # the arguments of each
_SHORT = 3  # letters that many names have in them
_PEERS = {  # their words for our arguments
    "dirpath": "store",
    "max_evals": "budget",
    "max_failures": "max_worker_losses",
    "monitor": "best",
    "n_trials": "budget",
    "num_samples": "budget",
    "param_space": "space",
    "run_config": "run",
    "sampler": "searcher",
    "save_top_k": "keep_best",
    "scheduler": "rungs",
    "search_alg": "searcher",
    "storage_path": "store",
    "train_loop_config": "config",
    "use_gpu": "gpus_per_worker",
}


def checked(call: C) -> C:
    """Refuse calls that do not fit the signature with a ConfigError instead of a TypeError.

    It names the argument that was probably meant, or the configuration that has it. Of a class
    that is no dataclass, arguments that are annotated as plain values are looked at as well; a
    dataclass calls `check_fields` when it has converted them.
    """
    if not isinstance(call, type):
        name = call.__qualname__.removesuffix(".__init__").replace("Context.", "ctx.")
        return _checked(call, name, values=False)
    plain_class = not is_dataclass(call)
    made: Any = call
    parameters = inspect.signature(call).parameters
    if parameters and all(each.kind is each.KEYWORD_ONLY for each in parameters.values()):
        _CONFIGURATIONS[call.__name__] = list(parameters)
    made.__init__ = _checked(made.__init__, None, values=plain_class)
    return call


def with_arguments_of(peer: Callable[..., Any]) -> Callable[[C], C]:
    """Of a constructor with `**named`: these are the arguments of `peer`.

    So `checked` refuses all others, and `help()` and editors show them.
    """

    def describe(call: C) -> C:
        kind = inspect.Parameter
        every = list(inspect.signature(call).parameters.values())
        own = [one for one in every if one.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)]
        theirs = list(inspect.signature(peer).parameters.values())[1:]  # without self
        if kind.VAR_POSITIONAL not in [one.kind for one in every]:
            theirs = [one.replace(kind=kind.KEYWORD_ONLY) for one in theirs]
        call.__signature__ = inspect.Signature([*own, *theirs])  # type: ignore[attr-defined]
        return call

    return describe


def _checked(function: C, name: str | None, *, values: bool) -> C:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(self: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever is given
        owner = name or type(self).__name__
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise ConfigError(_misfit(owner, signature, args, kwargs, error)) from None
        if not values:
            return function(self, *args, **kwargs)
        for given_name, value in bound.arguments.items():
            hint = signature.parameters[given_name].annotation
            bound.arguments[given_name] = check_value(owner, given_name, hint, value)
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]  # the same signature


def check_call(made: type, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuse a call of a class that does not fit its `__init__`, as `checked` does.

    For classes that derive from one that is checked: a dataclass has an `__init__` of its own.
    """
    signature = inspect.signature(made.__init__)  # type: ignore[misc]
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise ConfigError(_misfit(made.__name__, signature, args, kwargs, error)) from None


def _misfit(
    owner: str,
    signature: inspect.Signature,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    error: TypeError,
) -> str:
    """What is wrong with a call that does not fit, and what was probably meant."""
    parameters = list(signature.parameters.values())[1:]  # without self
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    listed = f"It has {', '.join(names)}." if names else "It has none."
    if takes_all and not names:
        listed = "Any names will do."
    unknown = [name for name in kwargs if name not in names and not takes_all]
    if unknown:
        hint = meant(owner, unknown[0], names)
        return f"{owner} has no argument {unknown[0]!r}. Nothing was done. {hint}{listed}"
    by_place = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(args) > len(by_place):
        some = f"only {' and '.join(by_place)}" if by_place else "no argument"
        extra = args[len(by_place)]
        instead = "name=value"
        if takes_all and isinstance(extra, Mapping):
            instead = "** before it, or name=value"
        return (
            f"{owner} takes {some} without a name, and was given {extra!r}. Nothing was done. "
            f"Write {instead}. {listed}"
        )
    given_names = {*by_place[: len(args)], *kwargs}
    missing = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and each.name not in given_names
    ]
    if missing:
        return f"{owner} needs {' and '.join(missing)}. Nothing was done. {listed}"
    return f"{owner}: {error}. Nothing was done."


def meant(owner: str, name: str, names: Sequence[str]) -> str:
    """What a wrong name was to be: a sentence with a blank behind it, or nothing."""
    word = _PEERS.get(name, name)
    if word != name and word in names:
        return f"Did you mean {word!r}? "
    owners = [other for other, its in _CONFIGURATIONS.items() if word in its and other != owner]
    if owners:
        what = "it" if word == name else word
        return f"{' and '.join(owners)} has {what}: {owners[0]}({word}=...). "
    return closest(name, names)


def closest(name: str, names: Sequence[str]) -> str:
    """The name that one looks like: a sentence with a blank behind it, or nothing."""
    low = name.lower()
    longer = [one for one in names if len(low) > _SHORT and low in one.lower()]
    shorter = [one for one in names if len(one) > _SHORT and one.lower() in low]
    close = longer or difflib.get_close_matches(name, names, 1) or shorter
    return f"Did you mean {close[0]!r}? " if close else ""


def check_train(train: Callable[..., object], elsewhere: str) -> None:
    """Refuse what cannot be a train function.

    Args:
        train: what was given.
        elsewhere: how it is given what else it needs.

    Raises:
        ConfigError: it cannot be called with a Context alone, or such a call would do nothing.
    """
    require(
        callable(train),
        f"train must be a function of one argument, not {train!r}. Nothing was started. Give the "
        "function itself, not what a call of it returns.",
    )
    is_model = any(each.__qualname__ == "Module" for each in type(train).__mro__)
    require(
        not is_model,
        f"train is a model ({type(train).__name__}). Nothing was started. Give the function that "
        "trains it: it takes the Context, and builds the model itself.",
    )
    try:
        inspect.signature(train, follow_wrapped=False).bind(None)
    except (TypeError, ValueError) as error:
        takes_none = "too many" in str(error)
        what = "it takes none" if takes_none else str(error)
        how = f"Give it what else it needs through {elsewhere}."
        raise ConfigError(
            f"train must take exactly one argument, the Context: {what}. Nothing was started. "
            f"{'Write `def train(ctx):`.' if takes_none else how}"
        ) from error
    for kind, found in (
        ("with `async def`", inspect.iscoroutinefunction(train)),
        ("with `yield`", inspect.isgeneratorfunction(train) or inspect.isasyncgenfunction(train)),
    ):
        require(
            not found,
            f"train is a function {kind}: a call of it runs nothing of what it says. Nothing was "
            "started. Write a plain function.",
        )


def is_whole(value: object, least: int = 0) -> bool:
    """Whether it is a whole number from there on; True is none, nor is one of more than 63 bits."""
    return type(value) is int and least <= value <= MOST


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with the message, unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def given(name: str, value: T | None, kind: type[T]) -> T:
    """The argument called `name`, or `kind()` where it is None.

    Raises:
        ConfigError: it is something else.
    """
    return kind() if value is None else of_kind(name, value, kind)


def of_kind(name: str, value: object, kind: type[T]) -> T:
    """The argument called `name`.

    Raises:
        ConfigError: it is not of that class.
    """
    if isinstance(value, kind):
        return value
    hint = ""
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], kind):
        hint = " A comma behind a closing parenthesis makes a tuple."
    elif value is kind:
        hint = f" Call it: {kind.__name__}(...)."
    what = f"{name} must be a {kind.__name__}, not {value!r}."
    raise ConfigError(f"{what}{hint} Nothing was started.")


def able(name: str, value: T, protocol: type[Any]) -> T:
    """The argument called `name`.

    Raises:
        ConfigError: it lacks a method of the protocol, or is a class and not an object of it.
    """
    methods = [m for m, what in vars(protocol).items() if callable(what) and not m.startswith("_")]
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if isinstance(value, type) and not missing:
        raise ConfigError(
            f"{name} is the class {value.__name__}. Nothing was started. Give an object: "
            f"{value.__name__}()."
        )
    require(
        not missing,
        f"{name} must be an object with the methods {', '.join(methods)}, not {value!r}. Nothing "
        "was started.",
    )
    return value


def all_able(name: str, values: Any, protocol: type[Any]) -> tuple[Any, ...]:  # noqa: ANN401
    """The argument called `name`, a list of such objects.

    Raises:
        ConfigError: it is no list or tuple, or something else is in it.
    """
    require(
        isinstance(values, list | tuple),
        f"{name} must be a list, not {values!r}. Nothing was started. Write [ ] around a single "
        "one.",
    )
    return tuple(able(f"an entry of {name}", value, protocol) for value in values)


def single(value: Any) -> Any:  # noqa: ANN401 - any value
    """The number in an array or tensor of one element; everything else as it is."""
    if hasattr(value, "item") and not isinstance(value, float | str):
        with suppress(RuntimeError, TypeError, ValueError):  # of several elements
            return value.item()
    return value


def plain(name: str, values: object) -> dict[str, Any]:
    """The argument called `name`, a mapping of names to JSON values; {} where it is None.

    Raises:
        ConfigError: it is none, or names the entry that JSON has no word for.
    """
    if values is None:
        return {}
    require(
        isinstance(values, Mapping) and all(isinstance(key, str) for key in values),
        f"{name} must be a mapping with text as keys, not {values!r}. Nothing was started.",
    )
    found: dict[str, Any] = dict(values)  # type: ignore[call-overload]  # a mapping, by now
    for key, value in found.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{name} has {key}={value!r}, a {type(value).__name__}, which the run's journal "
                f"cannot keep: {error}. Nothing was started. Give numbers, text, lists and "
                "mappings, and make the rest from them in the train function."
            ) from error
    return found


def check_fields(owner: object) -> None:
    """Refuse fields that are annotated as plain values and hold something else.

    Numbers and text of other classes, such as numpy's, become Python's own. Fields with
    alternatives that are not plain are left to their class.

    Raises:
        ConfigError: names the first, and its value.
    """
    cls: Any = type(owner)
    for name, hint in _hints(cls).items():
        value = check_value(cls.__name__, name, hint, getattr(owner, name))
        object.__setattr__(owner, name, value)  # it may be frozen


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:  # noqa: ANN401 - a class
    """They take longer to find than to check."""
    return get_type_hints(cls)


def check_value(owner: str, name: str, hint: object, value: object) -> object:
    """The value as a plain annotation says; any value where the annotation is not plain.

    Raises:
        ConfigError: it is of another class, not finite, or larger than anything can be.
    """
    allowed = _allowed(hint)
    if not allowed:
        return value
    for one in allowed:
        found = _as(one, value)
        if found is not None or one is None is value:
            break
    else:
        raise ConfigError(
            f"{owner}: {name} must be {_listed(allowed)}, not {value!r}. Nothing was started."
        )
    if isinstance(found, int | float):
        most = LONGEST_S if name.endswith("_s") else MOST
        require(
            abs(found) <= most,
            f"{owner}: {name} must be at most {most:g}, not {value!r}. Nothing was started.",
        )
    return found


def _allowed(hint: Any) -> tuple[object, ...]:  # noqa: ANN401 - an annotation
    """The classes of plain values that it names, its literals, and None; () if it has others."""
    origin = get_origin(hint)
    if origin is Literal:
        return get_args(hint)
    if origin in (UnionType, Union):
        parts = [_allowed(part) for part in get_args(hint)]
        return tuple(one for part in parts for one in part) if all(parts) else ()
    if hint is type(None):
        return (None,)
    return (hint,) if hint in _WORDS else ()


def _listed(allowed: Sequence[object]) -> str:
    words = [_WORDS[one] if isinstance(one, type) else repr(one) for one in allowed]
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _as(one: object, value: object) -> object:
    """The value as that class or that literal; None if it is neither."""
    if one is bool:
        return value if isinstance(value, bool) else None
    if one is int:
        found = whole(value)
        return found if type(found) is int else None
    if one is float:
        return _finite(value)
    if not isinstance(value, str):
        return None
    text = str.__str__(value)
    return text if one in (str, text) else None


def whole(value: object) -> object:
    """A whole number of any class, such as numpy's, as an int; other values as they are."""
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _finite(value: object) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, Integral):
        return int(value)
    try:
        found = float(value)
    except OverflowError:  # a fraction
        return None
    return found if math.isfinite(found) else None
