"""Model configs the tests resolve for: facts of real config.json files."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent / "data" / "models"


def config(name: str) -> dict[str, object]:
    """One config by file name."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
