"""`backstamp-transformers serve`: the engine's own server, asked over HTTP, answers on our kernels."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import app

import backstamp_transformers
from backstamp_transformers import serve
from backstamp_transformers.serve import device_type, main, meant_by, open_serving
from engines.transformers.tests.small_models import NEW_TOKENS, small_model

COMMAND = Path(sys.executable).with_name("backstamp-transformers")
PROMPTS = ["t5 t9 t33 t71 t2", "t88", "t17 t17 t101 t4 t63 t29 t90 t11 t3 t55 t120"]
PAIR = ("--prefill-attention-backend", "torch_native", "--decode-attention-backend", "flex_attention")
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 on disk, and a tokenizer whose words are its ids."""
    folder = tmp_path_factory.mktemp("served") / "model"
    small_model("qwen3").save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(128)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", unk_token="t0").save_pretrained(folder)
    return folder


@contextmanager
def serving(folder: Path, log: Path, *flags: str) -> Iterator[str]:
    """The address of a server that is up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ("--host", "127.0.0.1", "--port", str(port), "--device", "cpu")
    with log.open("w") as out:
        command = [COMMAND, "serve", str(folder), *where, *flags]
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=ENVIRONMENT)
    try:
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert child.poll() is None, log.read_text("utf-8")[-4000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status == 200
    except OSError:
        return False


def completion(url: str, model: Path, prompt: str) -> str:
    """The text that greedy decoding adds to a prompt."""
    asked = {"model": str(model), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
    head = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), head)
    ) as got:
        return json.loads(got.read())["choices"][0]["text"]


def wanted(model: Path) -> list[str]:
    """The same by `generate` in `eager`."""
    served, words = small_model("qwen3"), PreTrainedTokenizerFast.from_pretrained(model)
    found = []
    for prompt in PROMPTS:
        ids = words(prompt, return_tensors="pt").input_ids
        tokens = served.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :]
        found.append(words.decode(tokens))
    return found


@pytest.mark.parametrize("flags", [(), ("--continuous-batching", "--cb-num-blocks", "16")], ids=["generate", "batches"])
def test_the_server_answers_eager_tokens_on_the_asked_kernels(
    flags: tuple[str, ...], saved: Path, tmp_path: Path
) -> None:
    """Over HTTP, one request after another and in continuous batches; plan and stamps are in its log."""
    log = tmp_path / "log"
    with serving(saved, log, *PAIR, *flags) as url:
        found = [completion(url, saved, prompt) for prompt in PROMPTS]
    assert found == wanted(saved)
    said = log.read_text("utf-8")
    assert (
        "Backstamp plan for qwen3: prefill torch_native (backstamp-cpu 0.1.0, operator); decode flex_attention" in said
    )
    assert "Backstamp built torch_native for prefill" in said
    assert "Backstamp built flex_attention for decode" in said
    assert f"CB: {bool(flags)}" in said


def test_an_unknown_key_ends_the_start_before_weights_load(saved: Path, tmp_path: Path) -> None:
    """The refusal is the last thing said, without a traceback."""
    (saved / "model.safetensors").rename(tmp_path / "kept")
    (saved / "model.safetensors").write_bytes(b"no weights")
    try:
        command = [COMMAND, "serve", str(saved), "--device", "cpu", "--attention-backend", "fa33"]
        child = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    finally:
        (tmp_path / "kept").rename(saved / "model.safetensors")
    assert child.returncode == 1
    assert "'fa33', asked for with --attention-backend: " in child.stderr
    assert "Traceback" not in child.stdout + child.stderr


def test_a_name_of_transformers_beside_ours_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Two answers to one question are a usage error."""
    with pytest.raises(SystemExit, match="2"):
        # a port that is none, or the test would serve where the guard is gone
        main(["serve", "--attn-implementation=sdpa", "--attention-backend", "torch_native", "--port", "none"])
    assert "got --attn-implementation" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["--attention-backnd", "--prefil-attention-backend=fa3", "--linear-backend"])
def test_a_flag_of_ours_that_is_mistyped_is_told_here(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's own answer would list forty flags, none of them ours."""
    with pytest.raises(SystemExit, match="2"):
        main(["serve", wrong, "--port", "none"])
    said = capsys.readouterr().err
    assert f"unknown flag {wrong.partition('=')[0]}. Did you mean --" in said
    assert "attn-implementation" not in said


def test_no_flag_of_the_server_is_taken_for_one_of_ours_mistyped() -> None:
    """They go on as they are, and so does what is like none of ours."""
    flags = [name for parameter in app.commands["serve"].params for name in parameter.opts]
    # as near to --attention-backend as a mistyped one
    assert "--non-blocking" in flags
    assert {meant_by(flag) for flag in (*flags, "--no-compile", "--colour")} == {None}


def test_a_server_without_its_dependencies_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the extra that has them."""
    monkeypatch.setattr(serve, "is_serve_available", lambda: False)
    with pytest.raises(SystemExit, match=r"pip install 'backstamp-transformers\[serving\]'"):
        main(["serve", "--attention-backend", "torch_native", "--port", "none"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--device", "bogus"), "--device: needs a torch device, as cpu or cuda:0, got 'bogus'"),
        (("--attention-backend", ""), "--attention-backend: needs a key, got ''"),
        (("--decode-attention-backend", " fa3"), "--decode-attention-backend: needs a word"),
    ],
)
def test_a_refusal_names_the_flag_that_was_typed(asked: tuple[str, str], said: str) -> None:
    """Before the server starts, without a traceback."""
    with pytest.raises(SystemExit, match=said):
        main(["serve", *asked, "--port", "none"])


@pytest.mark.parametrize(
    ("flag", "wanted"), [("auto", None), ("1", "cuda"), ("cuda:1", "cuda"), ("cpu", "cpu"), ("xpu", "xpu")]
)
def test_a_model_is_resolved_for_the_device_it_will_run_on(flag: str, wanted: str | None) -> None:
    """`--device` as the server reads it: a number is a GPU, and `auto` is left to Transformers."""
    assert device_type(flag) == wanted


def test_the_servers_own_checks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other names are refused as before, and so is everything else the server checks."""
    monkeypatch.setattr(ModelManager, "_validate_args", ModelManager._validate_args)
    open_serving()
    name = backstamp_transformers.implementation("torch_native")
    assert ModelManager(attn_implementation=name).attn_implementation == name
    with pytest.raises(ValueError, match="Unsupported attention implementation: 'sdqa'"):
        ModelManager(attn_implementation="sdqa")
    with pytest.raises(ValueError, match="Unsupported quantization method"):
        ModelManager(attn_implementation=name, quantization="none")
