"""The command `elastix`, and `python -m elastix` for where it is not on the PATH."""

import io
import os
import sys
from functools import partial

from elastix.interrupts import importing


def main() -> None:
    """Run the command that the arguments name."""
    _open_what_is_closed()
    with importing("elastix"):
        from elastix.cli import app
        from elastix.commands.exit_codes import ends
    ends(partial(app, prog_name="elastix"))


def _open_what_is_closed() -> None:
    """Let what stdin, stdout or stderr lack go nowhere.

    Whoever starts a program may close them. The next file that is opened, a journal say, would take
    the number, and what libraries print would be written into it.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # letters that its encoding lacks


if __name__ == "__main__":
    main()
