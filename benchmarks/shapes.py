"""The one table of shapes: GPU tests check them, benchmarks time some of them."""

CHECKED_HEADS = (
    *(1, 2),  # fewer heads than any released model leaves on a GPU
    *(6, 12, 24, 48, 96),  # Kimi-K3 over 16, 8, 4, 2 GPUs and one
    *(4, 8, 16, 32, 64, 128),  # DeepSeek-V3 and Kimi-K2 over 16, 8, 4, 2 GPUs and one
)
CHECKED_BATCHES = (
    *range(1, 10),  # the one-token kernel, then every fill of an 8-token tile
    *(15, 16, 17, 31, 32, 33, 63, 64, 65),  # around the edges of the 16, 32 and 64 token tiles
    *(128, 257),  # whole tiles, and several tiles with a tail of one
)

TIMED_HEADS = (6, 12, 16)
TIMED_BATCHES = (1, 8, 16, 32, 64)
