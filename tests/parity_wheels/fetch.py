"""The Python source of two published engines, for `make test-parity`: fetched once, unpacked, never imported.

    python tests/parity_wheels/fetch.py FOLDER

SGLang is one wheel of pure Python with some data. vLLM's wheels are hundreds of megabytes of kernels, and pip builds a
source distribution before it hands it over, so its source archive is read from where the index says it lies, and held
against the hash the index gives. Of either only the Python files are kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path

SGLANG = "0.5.23"
VLLM = "0.33.0"
INDEX = "https://pypi.org/simple/vllm/"
FOLDER = Path(__file__).resolve().parents[2] / ".parity"


def sglang_models(folder: Path = FOLDER) -> Path:
    """SGLang's model folder, fetched if it is not there yet."""
    kept = folder / f"sglang-{SGLANG}"
    if not (kept / "complete").is_file():
        with tempfile.TemporaryDirectory() as name:
            # the wheel's tags are named, so that any interpreter on any machine fetches the same one
            tags = ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "--only-binary", ":all:"]
            command = [sys.executable, "-m", "pip", "download", "--no-deps", *tags, "-d", name, f"sglang=={SGLANG}"]
            subprocess.run(command, check=True)
            (wheel,) = Path(name).glob("sglang-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member.startswith("sglang/") and member.endswith(".py"):
                        _keep(kept, member, archive.read(member))
        (kept / "complete").touch()
    return kept / "sglang/srt/models"


def vllm_models(folder: Path = FOLDER) -> Path:
    """vLLM's model folder, fetched if it is not there yet."""
    kept = folder / f"vllm-{VLLM}"
    if not (kept / "complete").is_file():
        index = urllib.request.Request(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
        with urllib.request.urlopen(index, timeout=60) as answer:
            files = json.load(answer)["files"]
        (source,) = [file for file in files if file["filename"] == f"vllm-{VLLM}.tar.gz"]
        with urllib.request.urlopen(source["url"], timeout=600) as answer:
            data = answer.read()
        if hashlib.sha256(data).hexdigest() != source["hashes"]["sha256"]:
            raise SystemExit(f"{source['url']}: needs the hash the index gives, got another")
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                name = member.name.partition("/")[2]
                if member.isfile() and name.startswith("vllm/") and name.endswith(".py"):
                    stream = archive.extractfile(member)
                    assert stream is not None
                    _keep(kept, name, stream.read())
        (kept / "complete").touch()
    return kept / "vllm/model_executor/models"


def _keep(folder: Path, name: str, data: bytes) -> None:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise SystemExit(f"{name}: needs a path inside the archive")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    asked = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    print(sglang_models(asked), vllm_models(asked), sep="\n")
