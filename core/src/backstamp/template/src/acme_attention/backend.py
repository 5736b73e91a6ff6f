"""What this plugin builds: the only module that imports a kernel library."""

from dataclasses import dataclass

import torch
from backstamp.attention import Batch
from backstamp.factories import Built
from backstamp.step_checks import check_batch, check_build, check_call


def build(request):
    """One `BuildRequest` in, the kernel that was really built out."""
    # refuses every dtype, page size, layout and layer that the row does not declare
    check_build(request)
    return Built(
        "acme_attention_naive",
        NaiveAttention(request),
    )


@dataclass(frozen=True)
class Step:
    """A planned step: of each row its first token, the one after its last, its keys."""

    batch: Batch
    rows: tuple[tuple[int, int, int], ...]


class NaiveAttention:
    """Attention a row at a time; it holds workspaces, never the current batch."""

    def __init__(self, request):
        self.request = request

    def plan(self, batch, *, state=None, capture=False):
        """Once a step: refuse what the row does not declare, read the lengths."""
        check_batch(self.request, batch, capture=capture)
        starts, kv_lens = batch.qo_indptr_host.tolist(), batch.kv_lens_host.tolist()
        return Step(batch, tuple(zip(starts, starts[1:], kv_lens)))

    def forward(
        self,
        q,
        kv,
        layer,
        state,
        *,
        out=None,
        lse=None,
        new=None,
        q_rope=None,
        indices=None,
    ):
        """Once a layer: q [T, Hq, Dk] over the cache to out [T, Hq, Dv].

        The engine has written this step's K and V already.
        """
        batch, given = state.batch, {"new": new, "q_rope": q_rope, "indices": indices}
        check_call(self.request, q, kv, layer, batch, out=out, lse=lse, **given)
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        # tokens that see nothing, pads among them
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        for row, (start, stop, length) in enumerate(state.rows):
            if start == stop or length == 0:
                continue
            # pages past the last one may be stale, slots past the last key may hold NaN
            pages = batch.index.page_table[row, : -(-length // self.request.page_size)]
            k, v = (_keys(cache, pages, length, layer) for cache in (kv.k, kv.v))
            logits = torch.einsum("qhd,khd->qhk", q[start:stop].float(), k)
            logits = (logits * layer.scale).masked_fill(_future(logits), float("-inf"))
            answer = torch.einsum("qhk,khd->qhd", logits.softmax(-1), v)
            out[start:stop] = answer.to(out.dtype)
            if lse is not None:
                lse[start:stop] = logits.logsumexp(-1)
        return out


def _keys(cache, pages, length, layer):
    """A row's keys or values in order, one for each query head: [length, Hq, D]."""
    row = cache[pages.long()].flatten(0, 1)[:length].float()
    return row.repeat_interleave(layer.num_qo_heads // layer.num_kv_heads, 1)


def _future(logits):
    """Keys after each token, which is the last but some of the row: [Tq, 1, Tk]."""
    num_tokens, _, num_keys = logits.shape
    positions = torch.arange(num_keys - num_tokens, num_keys, device=logits.device)
    keys = torch.arange(num_keys, device=logits.device)
    return (keys > positions[:, None])[:, None]
