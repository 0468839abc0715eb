"""Training on packed documents: no document sees another, and nothing is computed between them."""

import jali
import torch
import torch.nn.functional as F

lengths = [700, 300, 548, 500]  # four documents in one sequence of 2048 tokens
mask = jali.CausalMask() & jali.DocumentMask.from_lengths(lengths)

L, H, D = sum(lengths), 4, 64
q, k, v = (torch.randn(1, H, L, D, requires_grad=True) for _ in range(3))
out = jali.attention(q, k, v, mask)
out.square().mean().backward()

# The same, one document at a time.
parts = [
    F.scaled_dot_product_attention(*(x.split(lengths, 2)[n] for x in (q, k, v)), is_causal=True)
    for n in range(len(lengths))
]
print("difference:", (out - torch.cat(parts, 2)).abs().max().item())

tiles = mask.tiles(1, H, L, L, tile=(64, 64))
print(f"tiles: {tiles.num_full} full, {tiles.num_partial} partial, {tiles.num_empty} skipped")
print(mask.draw(1, H, L, L, title="Four packed documents").terminal(width=60))
