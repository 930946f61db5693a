"""Entry point of the command line: well-formed calls run at once, everything else goes through Typer (app.py)."""

import sys


def main() -> None:
    """Entry point of the console script."""
    from roofline.cli.quick import run

    code = run(sys.argv[1:])
    if code is not None:
        sys.exit(code)
    from roofline.cli.app import app

    app()
