"""What a pickle says, and not how: equal for what was pickled equal, whichever process did it.

A pickler writes a reference where it meets an object again, and equal text may be one object here
and two there: in a module from its source or from its byte code. Sets it writes in the order of
hashes, which Python draws for each process. Torch writes where in memory a tensor lies. Nothing is
unpickled: no code of it runs.
"""

import io
import pickletools
from collections.abc import Collection, Sequence
from typing import Any

from blake3 import blake3

_ENVELOPE = {"PROTO", "FRAME", "STOP"}
_PUTS = {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_UNORDERED = {"FROZENSET", "ADDITEMS"}
_VALUES = {
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("STRING", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET", "GLOBAL", "STACK_GLOBAL"),
}
"""What cannot change: two that are equal are as good as one."""
_TORCH = (
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # so begins what a tensor's storage is pickled as
)
_TORCH_PICKLES = 5  # before its bytes; the last one has its name, which is an address


def content(pickled: bytes, leave_out: Collection[str] = ()) -> bytes:
    """A digest of it.

    Args:
        pickled: by any pickler.
        leave_out: texts that do not count.

    Raises:
        ValueError: it is no pickle.
    """
    stack: list[bytes] = []
    marks: list[int] = []
    memo: dict[int, bytes] = {}
    dropped: list[bytes] = []  # what was called for its effect alone
    last, objects = "", 0
    for operation, given, _ in pickletools.genops(pickled):
        name = operation.name
        if name in _ENVELOPE:
            continue
        if name == "MARK":
            marks.append(len(stack))
        elif name in _PUTS:
            place = len(memo) if given is None else int(given)
            objects += last not in _VALUES
            memo[place] = stack[-1] if last in _VALUES else _digest([b"object %d" % objects])
        elif name in _GETS:
            stack.append(memo[int(given or 0)])
        else:
            below, above = _taken(operation, stack, marks)
            above = sorted(above) if name in _UNORDERED else above
            said = b"" if given in leave_out else _raw(given)
            made = _digest([name.encode(), said, *below, *above])
            if not operation.stack_after:
                dropped.append(made)
            stack.extend([made] * len(operation.stack_after))
        last = name
    return _digest([*dropped, *stack])


def _taken(
    operation: pickletools.OpcodeInfo, stack: list[bytes], marks: list[int]
) -> tuple[list[bytes], list[bytes]]:
    """What an operation takes off the stack: below the last mark, and above it."""
    before = operation.stack_before
    above: list[bytes] = []
    if pickletools.markobject in before:
        mark = marks.pop()
        above = stack[mark:]
        del stack[mark:]
        before = before[: before.index(pickletools.markobject)]
    start = len(stack) - len(before)
    below = stack[start:]
    del stack[start:]
    return below, above


def _raw(given: Any) -> bytes:  # noqa: ANN401 - whatever an operation has
    if not isinstance(given, bytes | bytearray):
        return repr(given).encode()
    return _without_address(bytes(given)) if given.startswith(_TORCH) else bytes(given)


def _without_address(storage: bytes) -> bytes:
    file = io.BytesIO(storage)
    names: list[str] = []
    try:
        for _ in range(_TORCH_PICKLES):
            names = [text for _, text, _ in pickletools.genops(file) if isinstance(text, str)]
    except ValueError:  # another format than is known here
        return storage
    head, rest = storage[: file.tell()], storage[file.tell() :]
    for name in names:
        head = head.replace(len(name).to_bytes(4, "little") + name.encode(), b"")
    return head + rest


def _digest(parts: Sequence[bytes]) -> bytes:
    found = blake3()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.digest()
