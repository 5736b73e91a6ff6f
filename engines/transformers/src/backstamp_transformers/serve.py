"""`backstamp-transformers serve`: Transformers' own server, its models on the resolved kernels.

In: the flags of a request, and whatever `transformers serve` takes. Out: that command under a name of ours, which its
model manager, made for Transformers' own names, lets in. Plan and stamps go to stderr; a refusal ends the start.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Final

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import app
from transformers.utils.import_utils import is_serve_available

from backstamp.errors import BackstampError
from backstamp.text import near
from backstamp_transformers.asked import PREFIX, make_asked
from backstamp_transformers.engine_facts import check_release
from backstamp_transformers.names import register

__all__ = ["device_type", "main", "meant_by", "open_serving"]

_validate: Final = ModelManager._validate_args
#: The flag of each argument of a request.
FLAGS: Final = {
    "backend": "--attention-backend",
    "prefill": "--prefill-attention-backend",
    "decode": "--decode-attention-backend",
    "linear": "--linear-attn-backend",
    "device": "--device",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server until it is stopped; exits as `transformers serve` does, or with a refusal's text."""
    parser = _parser()
    asked, rest = parser.parse_known_args(arguments)
    _check_flags(parser, rest)
    if not is_serve_available():
        sys.exit(
            "backstamp-transformers serve: needs what Transformers' server imports, got none of it. "
            "pip install 'backstamp-transformers[serving]'"
        )
    logging.basicConfig(format="%(levelname)s [%(name)s] %(message)s")
    logging.getLogger("backstamp_transformers").setLevel(logging.INFO)
    try:
        check_release()
        request = make_asked(
            FLAGS,
            backend=asked.backend,
            prefill=asked.prefill,
            decode=asked.decode,
            linear=asked.linear,
            device=device_type(asked.device),
        )
        name = register(request)
        open_serving()
        app(["serve", "--attn-implementation", name, "--device", asked.device, *rest])
    except BackstampError as refusal:
        sys.exit(str(refusal))


def open_serving() -> None:
    """Let our names past the server's own list; every other name is checked as before."""
    ModelManager._validate_args = _validate_all_but_ours


def meant_by(flag: str) -> str | None:
    """The flag of ours that somebody meant; None of a flag the server has, or of one that is like none."""
    parameters = app.commands["serve"].params
    theirs = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    return None if flag in theirs else near(flag, [FLAGS[name] for name in FLAGS if name != "device"])


def device_type(device: str) -> str | None:
    """The torch device type of the server's own flag; None where it leaves the choice to Transformers."""
    if device.isdigit():
        return "cuda"
    return None if device == "auto" else device.partition(":")[0]


def _check_flags(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    for flag in (word.partition("=")[0] for word in rest if word.startswith("--")):
        meant = meant_by(flag)
        if flag == "--attn-implementation":
            parser.error(f"needs keys, as --attention-backend KEY, got {flag}")
        if meant is not None:
            parser.error(f"unknown flag {flag}. Did you mean {meant}?")


def _validate_all_but_ours(self: ModelManager) -> None:
    name = self.attn_implementation
    if name is not None and name.startswith(PREFIX):
        self.attn_implementation = None
    try:
        _validate(self)
    finally:
        self.attn_implementation = name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="backstamp-transformers",
        usage="%(prog)s serve [MODEL] [--attention-backend KEY] ...",
        allow_abbrev=False,
        description="Transformers' server on Backstamp's kernels.",
        epilog="MODEL and every other flag but --attn-implementation are as in `transformers serve --help`.",
    )
    parser.add_argument("command", choices=["serve"])
    parser.add_argument(FLAGS["backend"], dest="backend", metavar="KEY", help="prefill and decode; unset is auto")
    for name, what in (("prefill", "prefill"), ("decode", "decode"), ("linear", "linear layers")):
        parser.add_argument(FLAGS[name], dest=name, metavar="KEY", help=f"{what} alone")
    parser.add_argument(FLAGS["device"], default="auto", help="as in `transformers serve`")
    return parser
