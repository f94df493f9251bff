"""What a tar archive holds, from its headers alone. Pure: bytes are handed in by a function.

Stricter than reading an archive from front to back has to be, since a position must mean the same
sample for ever: what is not understood, cut off, or there twice is damage and never skipped.

Source of the format: POSIX.1-2017 pax (ustar and pax headers); GNU tar for long names and for
sizes in base 256.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from blake3 import blake3

from elastix.errors import Corrupt

BLOCK = 512
_ZEROS = bytes(BLOCK)
_MOST_EXTRA = 1 << 20  # of a long name or a pax header: a hostile one must not fill the memory
_REGULAR = b"0\x007"
_HARD_LINK = b"1"
_OTHERS = b"23456"  # symbolic links, devices, directories, pipes: they hold no bytes
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL = b"L", b"K", b"x", b"g"

Read = Callable[[int, int], bytes]
"""`read(offset, length)`: as many of these bytes as there are."""


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """One file of an archive.

    Attributes:
        name: as the archive has it, whatever it would mean to a file system.
        header: offset of its header, behind which its bytes begin.
        size: in bytes.
        mark: digest of the header, by which it is known again.
    """

    name: str
    header: int
    size: int
    mark: int


def mark_of(header: bytes) -> int:
    """Eight bytes that tell this header from all others."""
    return int.from_bytes(blake3(header).digest(8), "little", signed=True)


def members(read: Read, size: int, what: str) -> Iterator[ArchiveMember]:
    """The files of an archive of `size` bytes, in their order.

    Args:
        read: of the archive.
        size: of the archive, in bytes.
        what: its name, for messages.

    Raises:
        Corrupt: it is no tar archive, is damaged, or was cut off.
    """
    at = 0
    if read(0, 6).startswith(_COMPRESSED):
        raise Corrupt(
            f"{what} is compressed, and has no places that could be read one by one. Nothing was "
            "read from it. Unpack it with gunzip, bunzip2, unxz or unzstd."
        )
    of_all: dict[str, str] = {}
    own: dict[str, str] = {}
    while True:
        header = read(at, BLOCK)
        if len(header) < BLOCK:
            raise Corrupt(
                f"{what} ends at byte {size} without the two blocks of zeros that end an archive: "
                "it was cut off. Nothing was read from it. Copy it again."
            )
        if header == _ZEROS:
            _check_end(read, at, size, what)
            return
        kind, length = _kind_and_size(header, at, what)
        if kind in (_PAX, _PAX_OF_ALL):
            found = _pax(_extra(read, at, length, size, what), at, what)
            (own if kind == _PAX else of_all).update(found)
        elif kind == _LONG_NAME:
            own["path"] = _text(_extra(read, at, length, size, what).rstrip(b"\0"))
        elif kind == _LONG_LINK:
            _extra(read, at, length, size, what)
        else:
            said = {**of_all, **own}
            own = {}
            if any(name.startswith("GNU.sparse") for name in said):
                raise _odd(what, at, "a sparse file")
            length = _number(said.get("size", str(length)), at, what)
            name = said.get("path") or _name(header)
            if kind == _HARD_LINK:
                raise Corrupt(
                    f"{what} has {name!r} as a hard link at byte {at}: its bytes stand under "
                    "another name, so a sample would lack them. Nothing was read from it. Make the "
                    "archive again with `tar --hard-dereference`."
                )
            if kind in _REGULAR:
                _check_inside(at, length, size, what)
                yield ArchiveMember(name, at, length, mark_of(header))
            elif kind in _OTHERS:
                length = 0
            else:
                raise _odd(what, at, f"a member of type {kind!r}")
        at += BLOCK + -(-length // BLOCK) * BLOCK


def _odd(what: str, at: int, found: str) -> Corrupt:
    return Corrupt(
        f"{what} has {found} at byte {at}, which has no place in an archive of samples. Nothing "
        "was read from it. Make the archive again, without compression and without sparse files."
    )


def _check_inside(at: int, length: int, size: int, what: str) -> None:
    if at + BLOCK + length > size:
        raise Corrupt(
            f"{what} has {size} bytes, and the member at byte {at} would end at byte "
            f"{at + BLOCK + length}: it was cut off. Nothing was read from it. Copy it again."
        )


def _check_end(read: Read, at: int, size: int, what: str) -> None:
    """Two blocks of zeros, and nothing but zeros behind them."""
    if len(read(at + BLOCK, BLOCK)) < BLOCK:
        raise Corrupt(f"{what} was cut off in its last block, at byte {size}. Copy it again.")
    step = 1 << 20
    for start in range(at, size, step):
        if read(start, step).strip(b"\0"):
            raise Corrupt(
                f"{what} ends at byte {at} and has something else behind its end, as archives have "
                "that were written one behind the other. Nothing was read from it. Give each its "
                "own file, or make one archive of them with `tar --concatenate`."
            )


def _kind_and_size(header: bytes, at: int, what: str) -> tuple[bytes, int]:
    total = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if _octal(header[148:156]) != total:
        raise Corrupt(
            f"{what} has no valid tar header at byte {at}. Nothing was read from it. "
            + ("It is no tar archive." if at == 0 else "It is damaged: copy it again.")
        )
    field = header[124:136]
    number = int.from_bytes(field[1:]) if field[0] == 0x80 else _octal(field)
    if number is None:
        raise Corrupt(f"{what} has a member without a size at byte {at}. It is damaged.")
    return header[156:157], number


def _octal(field: bytes) -> int | None:
    digits = field.strip(b"\0 ")
    if not digits:
        return 0
    return int(digits, 8) if all(c in b"01234567" for c in digits) else None


def _number(text: str, at: int, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise Corrupt(f"{what} has a member of size {text[:40]!r} at byte {at}. It is damaged.")
    return int(text)


def _name(header: bytes) -> str:
    name = _text(header[:100].split(b"\0")[0])
    prefix = _text(header[345:500].split(b"\0")[0])
    posix = header[257:263] == b"ustar\0"  # GNU has times in place of the prefix
    return f"{prefix}/{name}" if prefix and posix else name


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _extra(read: Read, at: int, length: int, size: int, what: str) -> bytes:
    """What a header stands for that describes the next one."""
    _check_inside(at, length, size, what)
    if length > _MOST_EXTRA:
        raise _odd(what, at, f"a name or a pax header of {length} bytes")
    return read(at + BLOCK, length)


def _pax(raw: bytes, at: int, what: str) -> dict[str, str]:
    """Records of a length, a space, KEY=VALUE and the end of a line."""
    found = {}
    while raw.strip(b"\0"):
        digits, _, _ = raw.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        key, equals, value = raw[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or length > len(raw) or raw[length - 1 : length] != b"\n":
            raise Corrupt(f"{what} has a pax header at byte {at} that cannot be read: damaged.")
        found[_text(key)] = _text(value)
        raw = raw[length:]
    return found
