"""Run by a test in a process with two CPU devices: the launch that appends products, over a mesh and on one device.

Prints the slots of the pages that have keys then.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kernels_pallas.paged_attention import AttentionCall, HeadOptions, append_products, init_pages

N, K, H, T = 4, 2, 16, 5


def main() -> None:
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    biases: dict[str, Any] = {"q_bias": numbers(N, H), "k_bias": numbers(K, H), "v_bias": numbers(K, H)}
    norms: dict[str, Any] = {"q_norm": numbers(H), "k_norm": numbers(H)}
    turns: dict[str, Any] = {"cos": numbers(T, 1, 4), "sin": numbers(T, 1, 4)}
    heads = HeadOptions(**biases, **norms, **turns, epsilon=1e-3)
    # Rows of three and two tokens, after 14 and 20 others, in pages of 16.
    call = AttentionCall(
        block_tables=jnp.asarray([[3, 1], [0, 2]], jnp.int32),
        kv_lens=jnp.asarray([17, 22], jnp.int32),
        cu_q_lens=jnp.asarray([0, 3, 5], jnp.int32),
        implementation="gpu_interpret",
        scale=1.0,
    )
    q, k, v = numbers(T, N, H), numbers(T, K, H), numbers(T, K, H)
    halves = [jnp.split(part, 2, axis=1) for part in (q, k, v)]
    parts = jnp.stack([jnp.concatenate([part[i] for part in halves], axis=1) for i in range(2)], axis=1)
    pages = init_pages(4, 16, K, H, "float32", "gpu")

    whole = append_products(jnp.concatenate([q, k, v], axis=1)[:, None], pages, call, heads)
    split = jax.jit(append_products)(parts, pages, dataclasses.replace(call, mesh=mesh), heads)

    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-6, atol=1e-6)
    keys = np.asarray(whole[1].arrays[0]).reshape(-1, K, H)
    print(np.flatnonzero(np.abs(keys).sum((1, 2))).tolist())


if __name__ == "__main__":
    main()
