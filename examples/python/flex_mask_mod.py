"""A FlexAttention mask_mod, unchanged: a table lookup, arithmetic, and a comparison."""

import jali
import torch

L = 512
is_start = torch.arange(L) % 100 == 0  # tokens that everyone may look at


def mask_mod(b, h, q_idx, kv_idx):
    near = (q_idx - kv_idx) < 32 * (h + 1)  # each head has its own window
    return (q_idx >= kv_idx) & (near | is_start[kv_idx])


mask = jali.PredicateMask(mask_mod)
q, k, v = (torch.randn(1, 4, L, 64) for _ in range(3))
out = jali.attention(q, k, v, mask)

i, j = torch.arange(L)[:, None], torch.arange(L)
h = torch.arange(4)[:, None, None]
print("same cells:", torch.equal(mask.dense(1, 4, L, L)[0], mask_mod(0, h, i, j)))
