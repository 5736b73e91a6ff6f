"""vLLM serves with Backstamp's kernels: its own backend's tokens, stamps from inside the worker, red when broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.vllm.tests.serve_once import CHUNK, NUM_PROMPTS, prompts
from engines.vllm.tests.serving import Served, serve
from tests.documents import install_documented_plugin
from tests.third_party.installing import install_third_parties

PAIR = {"prefill_attention_backend": "flex_attention", "decode_attention_backend": "torch_native"}


@pytest.fixture(scope="module")
def own(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """What vLLM's own backend answers, with this adapter installed and not asked for."""
    return {name: serve(tmp_path_factory.mktemp("own"), model) for name, model in models.items()}


def third_party(folder: Path, change: tuple[str, str] = ("", "")) -> Path:
    """The plugin of docs/write-a-plugin.md, as its author would install it, or broken."""

    def broken(text: str) -> str:
        return text.replace(*change) if change[0] else text

    return install_documented_plugin(folder / "site-packages", broken)


def test_the_prompts_are_chunked_and_share_prefixes(own: dict[str, Served]) -> None:
    """What the other tests compare is not the easy case: chunks, cached prefixes, and tokens that differ."""
    long = [prompt for prompt in prompts(256) if len(prompt) > CHUNK]
    assert len(long) >= NUM_PROMPTS // 2
    for served in own.values():
        assert len(served.tokens) == NUM_PROMPTS, served.log[-4000:]
        assert sum(cached > 0 for cached in served.cached) >= 4
        assert len(set(served.tokens)) > NUM_PROMPTS // 2
        assert any(len(set(row)) > 3 for row in served.tokens)


def test_another_backend_is_left_alone(own: dict[str, Served]) -> None:
    """Installed and not asked for, the adapter is a list of names: no override, none of its layers, no kernel."""
    for served in own.values():
        assert served.touched == {
            "impls": ["vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"],
            "decode_first": None,
            "overridden": [],
            "replaced": [],
            "modules": ["backstamp_vllm.names", "backstamp_vllm.unread"],
        }
        assert served.stamps == {}
        assert "Backstamp plan" not in served.log


@pytest.mark.parametrize("model", ["full", "window", "sinks", "softcap"])
def test_a_key_serves_what_vllm_serves(
    model: str, models: dict[str, Path], own: dict[str, Served], tmp_path: Path
) -> None:
    """`--attention-backend torch_native`: equal greedy tokens, the stamp in the worker, plan and stamp in the log."""
    served = serve(tmp_path, models[model], attention_backend="torch_native")
    assert served.tokens == own[model].tokens, served.log[-4000:]
    assert served.cached == own[model].cached
    assert (served.touched or {})["decode_first"] is None
    layers = len(served.kernels("prefill"))
    assert served.kernels("prefill") == served.kernels("decode") == ["torch_native"] * layers
    stamp = next(iter((served.stamps or {}).values()))["decode"]
    assert stamp["plugin"] == {"name": "cpu", "distribution": "backstamp-cpu", "version": "0.1.0"}
    assert stamp["source"] == "operator"
    assert "Backstamp answers for CPU_ATTN: TORCH_NATIVE was asked for" in served.log
    assert "prefill torch_native (backstamp-cpu 0.1.0, operator)" in served.log
    assert "Backstamp built torch_native for prefill, decode" in served.log


@pytest.mark.parametrize("model", ["full", "window"])
def test_a_pair_serves_each_half_by_its_own_kernel(
    model: str, models: dict[str, Path], own: dict[str, Served], tmp_path: Path
) -> None:
    """`CUSTOM` with a pair in `--additional-config`: mixed steps are split, and tokens stay equal."""
    served = serve(tmp_path, models[model], attention_backend="CUSTOM", additional_config={"backstamp": PAIR})
    assert served.tokens == own[model].tokens, served.log[-4000:]
    assert set(served.kernels("prefill")) == {"flex_attention"}
    assert set(served.kernels("decode")) == {"torch_native"}
    # without it vLLM leaves rows in any order, and prefill's kernel serves them all
    assert (served.touched or {})["decode_first"] == 1


def test_the_documented_plugin_serves(models: dict[str, Path], own: dict[str, Served], tmp_path: Path) -> None:
    """What docs/write-a-plugin.md has its reader write, without a line for vLLM: the worker runs its kernel."""
    served = serve(tmp_path, models["full"], site=third_party(tmp_path), attention_backend="acme_attention")
    assert served.tokens == own["full"].tokens, served.log[-4000:]
    assert set(served.kernels("prefill")) == {"acme_attention_naive"}


def test_an_installed_third_party_plugin_serves(
    models: dict[str, Path], own: dict[str, Served], tmp_path: Path
) -> None:
    """The distribution that Transformers' suite installs too: its key is a name, and its windows are vLLM's."""
    site = install_third_parties(tmp_path, "acme-attention")
    served = serve(tmp_path / "served", models["window"], site=site, attention_backend="acme")
    assert served.tokens == own["window"].tokens, served.log[-4000:]
    stamps = [half for halves in (served.stamps or {}).values() for half in halves.values()]
    assert {stamp["plugin"]["distribution"] for stamp in stamps} == {"acme-attention"}


BROKEN = {
    "zeros": ("out[start:stop] = answer", "out[start:stop] = 0 * answer"),
    "no-causal-mask": ('.masked_fill(_future(logits), float("-inf"))', ""),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_seen(fault: str, models: dict[str, Path], own: dict[str, Served], tmp_path: Path) -> None:
    """The same plugin with attention that answers zeros, or without its causal mask: other tokens."""
    site = third_party(tmp_path, BROKEN[fault])
    served = serve(tmp_path, models["full"], site=site, attention_backend="acme_attention")
    assert set(served.kernels("prefill")) == {"acme_attention_naive"}
    assert len(served.tokens) == NUM_PROMPTS
    assert served.tokens != own["full"].tokens
