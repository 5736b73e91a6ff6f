"""`demo` placeholder."""

import typer


def add_to(app: typer.Typer) -> None:
    """Add."""
