"""`python -m elastix` is `elastix`, for where the command is not on the PATH."""

from elastix.cli import app

if __name__ == "__main__":
    app(prog_name="elastix")
