"""No bit of a journal can be flipped, and no line be lost, without a reader that says so."""

import json
import os
import re

import pytest

from elastix.errors import Corrupt
from elastix.event_records import to_record
from elastix.events import BatchShares, Reported, Resumed, SamplesLeftOut, StepCommitted
from elastix.observe.journal import Journal, Tail, lines, read, read_only, read_part, read_placed
from elastix.observe.sealed_lines import SEAL

EVENTS = [
    Resumed(t=1.0, step=0, ref=""),
    StepCommitted(
        t=2.0,
        step=1,
        generation=1,
        world_size=2,
        batches=(BatchShares(loader=0, epoch=0, shares={0: ((0, 8),), 1: ((8, 16),)}, owed=()),),
    ),
    SamplesLeftOut(t=3.0, loader=0, spans=((16, 24),)),
    Reported(t=4.0, seq=0, step=1, metrics={"loss": 0.5, "note": "five"}),
]


def write(path, *events):
    with Journal(path) as journal:
        for number, event in enumerate(events):
            journal.append(event, None if number % 2 else number)


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "journal.jsonl", *EVENTS)
    return tmp_path / "journal.jsonl"


READERS = {
    "read": lambda path: list(read(path)),
    "lines": lambda path: list(lines(path)),
    "some": lambda path: list(read_only(path, SamplesLeftOut)),
    "tail": lambda path: Tail(path).news(),
}


@pytest.mark.timeout(30)
def test_a_last_line_of_hundreds_of_megabytes_is_passed_over_in_one_go(path):
    os.truncate(path, 1 << 28)  # zeros, as a file system may leave them behind when power is lost
    assert [event for event, *_ in read_placed(path)] == EVENTS


@pytest.mark.parametrize("reader", READERS)
def test_every_flipped_bit_is_noticed_by_every_reader(path, reader):
    whole = path.read_bytes()
    found = READERS[reader]
    there = found(path)
    last = len(whole) - 1
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            if reader == "tail" and place == last:  # it waits for the break, and tells nothing
                assert found(path) == there[:-1]
                continue
            with pytest.raises(Corrupt, match=r"journal\.jsonl"):
                found(path)


def test_nothing_is_cut_off_that_has_only_lost_its_line_break(path):
    """It would be the end of a run, or of a step, which whoever wrote it relies on."""
    damaged = path.read_bytes()[:-1] + b"\x0b"
    path.write_bytes(damaged)
    with pytest.raises(Corrupt, match="has lost its line break"):
        Journal(path)
    assert path.read_bytes() == damaged
    path.write_bytes(damaged[:-1] + b"\n")
    write(path, EVENTS[0])
    assert list(read(path)) == [*EVENTS, EVENTS[0]]


@pytest.mark.parametrize("place", range(3 * SEAL))
def test_a_line_that_was_damaged_before_others_were_added_stays_so(path, place):
    """Whoever goes on goes by the last line: its end."""
    damaged = bytearray(path.read_bytes())
    damaged[-2 - place] ^= 1
    path.write_bytes(damaged)
    write(path, EVENTS[0])
    with pytest.raises(Corrupt, match="line 4 of"):
        list(read(path))


@pytest.mark.parametrize(
    ("order", "bad"),
    [((0, 2, 3), 2), ((1, 2, 3), 1), ((0, 1, 1, 2, 3), 3), ((0, 2, 1, 3), 2), ((3,), 1)],
)
def test_a_line_that_is_lost_or_doubled_or_elsewhere_is_noticed(path, order, bad):
    there = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(there[place] for place in order))
    for find in READERS.values():
        with pytest.raises(Corrupt):
            find(path)
    told = []
    with pytest.raises(Corrupt, match=rf"line {bad} of .*\. Restore the file from a backup"):
        told.extend(read(path))
    assert told == EVENTS[: bad - 1], "those before it are handed out"


def test_an_earlier_versions_journal_is_read_and_written_on(tmp_path):
    path = tmp_path / "journal.jsonl"
    as_text = json.JSONEncoder(separators=(",", ":")).encode
    path.write_text("".join(as_text(to_record(event)) + "\n" for event in EVENTS))
    assert list(read(path)) == Tail(path).news() == EVENTS
    write(path, *EVENTS)
    assert list(read(path)) == Tail(path).news() == EVENTS * 2
    assert list(read_only(path, SamplesLeftOut)) == [EVENTS[2]] * 2
    there = path.read_bytes().splitlines(keepends=True)
    assert len(re.findall(rb'"crc":"[0-9a-f]{8}"}\n', path.read_bytes())) == len(EVENTS)
    path.write_bytes(b"".join([*there[:5], *there[6:]]))
    with pytest.raises(Corrupt, match="line 6 of"):
        list(read(path))


@pytest.mark.parametrize("reader", READERS)
def test_a_journal_whose_line_breaks_were_converted_is_not_read_unchecked(path, reader):
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(Corrupt, match="its checksum does not fit"):
        READERS[reader](path)


def test_reading_from_the_middle_checks_as_well(path):
    ends = [end for _, _, end in read_placed(path)]
    assert read_part(path, ends[0], 1, 2) == EVENTS[2:]
    damaged = bytearray(path.read_bytes())
    damaged[ends[1] + 30] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(Corrupt, match=r"a line of .*journal\.jsonl"):
        read_part(path, ends[0], 0, 3)


def test_damage_in_a_long_journal_is_named_by_its_line(tmp_path):
    """Lines are checked many at once, whose blocks end anywhere in one."""
    path = tmp_path / "journal.jsonl"
    events = [Resumed(t=float(step), step=step, ref="x" * (step % 97)) for step in range(4000)]
    with Journal(path) as journal:
        for event in events:
            journal.append(event)
    assert list(read(path)) == events
    text = path.read_bytes()
    assert len(text) > 3 * (1 << 17)
    there = text.splitlines(keepends=True)
    for number in (0, 1000, 3999):
        line = bytearray(there[number])
        line[12] ^= 1
        path.write_bytes(b"".join([*there[:number], bytes(line), *there[number + 1 :]]))
        with pytest.raises(Corrupt, match=rf"line {number + 1} of"):
            list(lines(path))
