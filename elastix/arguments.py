"""Whether what a user gave is of the type that is asked for, before anything is done with it.

Not here: whether a value of the right type makes sense (the class that it belongs to).
"""

import json
from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from elastix.errors import ConfigError

T = TypeVar("T")

_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


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


def flag(name: str, value: object) -> bool:
    """The argument called `name`.

    Raises:
        ConfigError: it is neither True nor False.
    """
    what = f"{name} must be True or False, not {value!r}."
    require(isinstance(value, bool), f"{what} Nothing was started.")
    return value is True


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

    Fields with alternatives beyond None are left to their class.

    Raises:
        ConfigError: names the first, and its value.
    """
    for name, hint in get_type_hints(type(owner)).items():
        kind, may_be_none = _plain(hint)
        value = getattr(owner, name)
        if kind is None or (value is None and may_be_none):
            continue
        words = _WORDS[kind] + (" or None" if may_be_none else "")
        require(
            _is(value, kind),
            f"{type(owner).__name__}: {name} must be {words}, not {value!r}. Nothing was started.",
        )


def _plain(hint: Any) -> tuple[type | None, bool]:  # noqa: ANN401 - an annotation
    """The class of plain values that an annotation names, and whether None is one too."""
    parts = set(get_args(hint)) if get_origin(hint) is UnionType else {hint}
    classes = parts - {type(None)}
    if len(classes) != 1 or not classes <= _WORDS.keys():
        return None, False
    return classes.pop(), type(None) in parts


def _is(value: object, kind: type) -> bool:
    """Of this very class: True is no number, and 2.0 no whole one."""
    return type(value) in (int, float) if kind is float else type(value) is kind
