"""Where the bundled demo model and its held-out examples lie; it knows nothing of running them."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent

MODEL_DIR: Path = _HERE / "model"
EXAMPLES: Path = _HERE / "examples.jsonl"
