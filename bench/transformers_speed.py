"""Tokens a second of Transformers on our kernels, beside its own attention in one run.

    python bench/transformers_speed.py [--implementations NAME...] [--rounds N] [--new-tokens N] [--tiny] [--json]
        [--output FILE]

One Llama of 1.1 billion random bf16 parameters: `generate` with eight prompts of 1024 tokens, and `generate_batch`
(continuous batching) with 32 prompts of 64 to 1024, 128 new tokens each. A name with a slash is one of ours
(`backstamp/fa3`; `backstamp/fa3+flashinfer` is a pair), any other Transformers' own. Each is held to `sdpa` first: the
logits behind the prompts, and in continuous batching each request's first token. Times are medians of rounds taken in
turn, behind one run of each that is not timed; one that cannot run here says why.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import backstamp_transformers

__all__ = ["WORKS", "measure"]

OWN: Final = ("sdpa", "flash_attention_3", "flash_attention_2")
OURS: Final = ("backstamp/triton", "backstamp/fa3", "backstamp/flashinfer", "backstamp/fa3+triton")
#: Most relative error of the logits in bf16, and least share of requests whose first token is that of `sdpa`: random
#: weights have near ties.
BOUND: Final = 3e-2
ALIKE: Final = 0.8


class Generated(NamedTuple):
    """How many tokens a run made, and the first of each request where requests are held to it."""

    count: int
    firsts: list[int]


class Load(NamedTuple):
    """The model, the prompts of both works, the tokens each asks for, blocks of the cache (None: all that fit)."""

    config: LlamaConfig
    dtype: torch.dtype
    prompts: tuple[int, int]
    lengths: tuple[int, ...]
    new_tokens: int
    blocks: int | None = None


_BIG: Final = {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 16}
_SMALL: Final = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4}
FULL: Final = Load(
    LlamaConfig(vocab_size=32000, num_key_value_heads=4, max_position_embeddings=4096, **_BIG),
    torch.bfloat16,
    (8, 1024),
    tuple(64 + 31 * (at * 7 % 32) for at in range(32)),
    128,
)
TINY: Final = Load(
    LlamaConfig(vocab_size=128, num_key_value_heads=2, max_position_embeddings=256, **_SMALL),
    torch.float32,
    (2, 24),
    (5, 19, 33),
    8,
    64,
)


def main() -> int:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementations", nargs="+", default=[*OWN, *OURS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, metavar="N", help="tokens asked for in place of 128 (8 with --tiny)")
    parser.add_argument("--tiny", action="store_true", help="a small model; its times are no figures")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="write the rows into this file")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load = TINY if options.tiny else FULL
    if options.new_tokens is not None:
        load = load._replace(new_tokens=options.new_tokens)
    about: dict[str, Any] = {
        "host": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "new_tokens": load.new_tokens,
        "results": [],
    }
    for row in measure(load, options.implementations, options.rounds, device):
        about["results"].append(row)
        if options.output is not None:
            # a later work that does not end takes nothing with it
            options.output.write_text(json.dumps(about, indent=1) + "\n", "utf-8")
        if not options.json:
            print(_line(row), flush=True)
    if options.json:
        print(json.dumps(about, indent=1))
    return int(any(row.get("status") == "wrong" for row in about["results"]))


def measure(load: Load, names: Sequence[str], rounds: int, device: str) -> Iterator[dict[str, Any]]:
    """A row of each work and implementation: tokens a second and the ratio to the best, or why there is none."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(load.config).to(load.dtype).eval()
    prompts = torch.randint(2, load.config.vocab_size, load.prompts, device=device)
    model.set_attn_implementation("sdpa")
    truth, firsts = _logits(model, prompts), _first_tokens(model, load)
    with contextlib.ExitStack() as serving:
        models: dict[str, LlamaForCausalLM] = {}
        for name in names:
            try:
                models[name] = serving.enter_context(_served(model, name))
                error = float((_logits(models[name], prompts) - truth).norm() / truth.norm())
                if error > BOUND:
                    del models[name]
                    yield from _none_of(name, "wrong", f"relative error {error:.1e}")
            except Exception as cause:
                models.pop(name, None)
                yield from _none_of(name, "not run", _reason(cause))
        for work, run in WORKS.items():
            yield from _timed(work, run, models, prompts, firsts, load, rounds)


def _timed(
    work: str,
    run: Callable[[LlamaForCausalLM, torch.Tensor, Load], Generated],
    models: Mapping[str, LlamaForCausalLM],
    prompts: torch.Tensor,
    firsts: list[int],
    load: Load,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """A row of each implementation in one work."""
    speeds: dict[str, list[float]] = {}
    for name, model in models.items():
        try:
            # the first run compiles
            told = run(model, prompts, load)
        except Exception as cause:
            yield {"work": work, "implementation": name, "status": "not run", "reason": _reason(cause)}
            continue
        alike = sum(a == b for a, b in zip(told.firsts, firsts, strict=True)) if told.firsts else len(firsts)
        if alike < ALIKE * len(firsts):
            found = f"{alike} of {len(firsts)} first tokens"
            yield {"work": work, "implementation": name, "status": "wrong", "reason": found}
            continue
        speeds[name] = []
    for _ in range(rounds):
        for name, told_speeds in speeds.items():
            began = time.perf_counter()
            tokens = run(models[name], prompts, load).count
            took = time.perf_counter() - began
            told_speeds.append(tokens / took)
            print(f"{work} {name}: {tokens} tokens in {took:.2f} s", file=sys.stderr)
    medians = {name: statistics.median(of) for name, of in speeds.items()}
    for name, speed in medians.items():
        ratio = round(speed / max(medians.values()), 3)
        yield {"work": work, "implementation": name, "tokens_per_s": round(speed, 1), "ratio_to_best": ratio}


def _none_of(name: str, status: str, reason: str) -> Iterator[dict[str, Any]]:
    for work in WORKS:
        yield {"work": work, "implementation": name, "status": status, "reason": reason}


def _reason(cause: Exception) -> str:
    return f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"[:300]


@contextlib.contextmanager
def _served(model: LlamaForCausalLM, name: str) -> Iterator[LlamaForCausalLM]:
    """The same weights in a model of their own on one implementation, Transformers' or ours."""
    ours, _, keys = name.partition("/")
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    if not keys:
        twin.set_attn_implementation(name)
        yield twin
        return
    if ours != "backstamp":
        raise ValueError(f"implementation {name!r}: needs backstamp/KEY or a name of Transformers, got {ours}/")
    prefill, _, decode = keys.partition("+")
    with backstamp_transformers.use(twin, prefill=prefill, decode=decode or prefill):
        yield twin


@torch.no_grad()
def _logits(model: LlamaForCausalLM, prompts: torch.Tensor) -> torch.Tensor:
    return model(prompts, use_cache=True).logits[:, -1].float()


@torch.no_grad()
def _first_tokens(model: LlamaForCausalLM, load: Load) -> list[int]:
    """What each request of continuous batching goes on with, one by one."""
    return [int(model(torch.tensor([of], device=model.device)).logits[0, -1].argmax()) for of in _requests(load)]


def _requests(load: Load) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(2, load.config.vocab_size, (n,), generator=draw).tolist() for n in load.lengths]


@torch.no_grad()
def _generate(model: LlamaForCausalLM, prompts: torch.Tensor, load: Load) -> Generated:
    found = model.generate(prompts, generation_config=_generation(load))
    return Generated(int(found.shape[0] * (found.shape[1] - prompts.shape[1])), [])


@torch.no_grad()
def _generate_batch(model: LlamaForCausalLM, prompts: torch.Tensor, load: Load) -> Generated:
    requests = _requests(load)
    batching = ContinuousBatchingConfig(auto_switch_to_flash=False, num_blocks=load.blocks)
    found = model.generate_batch(
        inputs=requests,
        generation_config=_generation(load),
        continuous_batching_config=batching,
        progress_bar=False,
    )
    answers = [found[key].generated_tokens for key in sorted(found, key=lambda key: int(key.rpartition("_")[2]))]
    count = sum(map(len, answers))
    if count < len(requests) * load.new_tokens:
        raise RuntimeError(f"generate_batch answered {count} tokens of {len(requests) * load.new_tokens}")
    return Generated(count, [tokens[0] for tokens in answers])


WORKS: Final = {"generate": _generate, "generate_batch": _generate_batch}


def _generation(load: Load) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=load.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)


def _line(row: dict[str, Any]) -> str:
    name = f"{row['work']:16}{row['implementation']:28}"
    if "status" in row:
        return f"{name}{row['status']}: {row['reason']}"
    return f"{name}{row['tokens_per_s']:>10.1f} tokens/s, {row['ratio_to_best']:.2f} of the best"


if __name__ == "__main__":
    sys.exit(main())
