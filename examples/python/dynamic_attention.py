"""Dynamic mask attention: every row keeps the 64 best keys by a score that is learned."""

import jali
import torch

B, H, L, D, keep = 1, 4, 1024, 32, 64
q, k, v = (torch.randn(B, H, L, D, requires_grad=True) for _ in range(3))
dt_proj = torch.randn(H, H * D, requires_grad=True)  # a score mixes the values of all heads
A = torch.full((H,), 0.1, requires_grad=True)

scores = jali.dynamic_scores(v, dt_proj / (H * D) ** 0.5, A)  # [B, H, L]
mask = jali.DynamicMask(scores, keep=keep)
out = jali.attention(q, k, v, mask, key_bias=scores)
out.square().mean().backward()

cells = mask.dense(B, H, L, L)
print("keys of rows 10, 100, 1000:", cells[0, 0].sum(-1)[[10, 100, 1000]].tolist())
print("gradient of A:", A.grad)
