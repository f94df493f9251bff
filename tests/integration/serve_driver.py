"""The command line, as a process that a test can end."""

from elastix.cli import app

if __name__ == "__main__":
    app(prog_name="elastix")
