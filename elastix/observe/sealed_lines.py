"""Lines of JSON of which each tells whether all lines up to it are as they were written.

The last field of a line, `"crc":"89abcdef"`, is the CRC-32 of all that stands before that field,
from the first line on that has one. So a flipped bit is noticed, and a line that is missing, that
is there twice, or in the place of another. Whoever passes over most lines checks many at once.

Lines of earlier versions have no such field, and are read unchecked if they stand before all that
have one. Not here: what a line says (event_records), and where it is written (journal).
"""

from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

from elastix.errors import Corrupt

_FIELD = b',"crc":"'
SEAL = len(_FIELD) + 8 + len(b'"}\n')
"""Bytes that a line ends with: the field, the brace that was there before, and the line break."""


_FIELD_AT, _SUM_AT = 1 - SEAL, 1 - SEAL + len(_FIELD)  # in a line without its break


def seal(line: bytes, before: int) -> tuple[bytes, int]:
    """A JSON object as a line of the file, and the checksum of the file with it.

    Args:
        line: the object, not empty and without a line break.
        before: the checksum of the file up to here.
    """
    body = line[:-1]
    here = crc32(body, before)
    end = b'%b%08x"}\n' % (_FIELD, here)
    return body + end, crc32(end, here)


def is_sealed(line: bytes) -> bool:
    """Whether a line, without its break, has a checksum."""
    return line[_FIELD_AT:_SUM_AT] == _FIELD


def checksum(end: bytes) -> int:
    """Of a file, by the bytes that its last line ends with; 0 if that line has none."""
    if not is_sealed(end[:-1]):
        return 0
    try:
        return crc32(end[-SEAL:], int(end[_SUM_AT - 1 : -3], 16))
    except ValueError:  # whoever reads that line says that it is damaged
        return 0


class LineChecker:
    """Hands out the lines of a file that is read in blocks, and checks them.

    Args:
        path: of the file, to name it.
        before: the checksum of the file before the first block.
        number: of lines before it; None if nobody knows.
    """

    def __init__(self, path: Path, before: int = 0, number: int | None = 0) -> None:
        self._path = path
        self._before = before
        self._number = number
        self._rest: list[bytes] = []  # after the last line break; joined once, however long it is
        self._end = b""  # of that

    def lines(self, block: bytes) -> Iterator[bytes]:
        """The lines that end in the block, without their breaks.

        Raises:
            Corrupt: a line is not as it was written. Those before it were handed out.
        """
        cut = block.rfind(b"\n") + 1
        if cut:
            whole = b"".join((*self._rest, block[:cut]))
            self._rest, self._end = [], b""
            lines = whole[:-1].split(b"\n")
            yield from lines if self._hold(whole, len(lines)) else self._each(lines)
        self._rest.append(block[cut:])
        self._end = (self._end + block[cut:])[-SEAL:]
        if is_sealed(self._end[:-1]) and self._is_line(b"".join(self._rest)[:-1]):
            raise self._damaged("has lost its line break")

    def _hold(self, whole: bytes, number: int) -> bool:
        """Whether all lines have checksums, and the last one proves them right."""
        here = crc32(memoryview(whole)[:-SEAL], self._before)
        end = b'%b%08x"}\n' % (_FIELD, here)
        if whole[-SEAL:] != end:
            return False
        self._before = crc32(end, here)
        self._number = None if self._number is None else self._number + number
        return True

    def _each(self, lines: list[bytes]) -> Iterator[bytes]:
        for line in lines:
            if self._is_line(line):
                self._before = checksum(line + b"\n")
            elif self._before or is_sealed(line.rstrip()):  # "\r\n" is no line break of ours
                raise self._damaged("is not as it was written, or one before it is missing")
            self._number = None if self._number is None else self._number + 1
            yield line

    def _is_line(self, line: bytes) -> bool:
        return is_sealed(line) and line + b"\n" == seal(line[:_FIELD_AT] + b"}", self._before)[0]

    def _damaged(self, how: str) -> Corrupt:
        which = "a line" if self._number is None else f"line {self._number + 1}"
        return Corrupt(
            f"{which} of {self._path} {how}: its checksum does not fit. Nothing was changed. "
            "Restore the file from a backup. Without one, choose another name for what is run "
            "next: models and States that are in the store can be used."
        )
