"""What the loopback plugin builds: row by row in float64."""

from backstamp.factories import Built
from backstamp.step_checks import check_batch, check_build, check_call
from backstamp.testing.reference import reference_attention


def build(request):
    check_build(request)
    return Built("loopback", Loopback(request))


class Loopback:
    def __init__(self, request):
        self.request = request

    def plan(self, batch, *, state=None, capture=False):
        check_batch(self.request, batch, capture=capture, row_causal=True, left_padding=True)
        return batch

    def forward(self, q, kv, layer, state, *, out=None, lse=None, new=None, q_rope=None, indices=None):
        check_call(self.request, q, kv, layer, state, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        answer, logs = reference_attention(q, kv, layer, state, new=new)
        out.copy_(answer)
        if lse is not None:
            lse.copy_(logs)
        return out
