"""The command `elastix`, and `python -m elastix` for where it is not on the PATH."""

from elastix.interrupts import importing


def main() -> None:
    """Run the command that the arguments name."""
    with importing("elastix"):
        from elastix.cli import app
    app(prog_name="elastix")


if __name__ == "__main__":
    main()
