"""The one signature of latent attention (MLA, DeepSeek-V2), and the choice among its implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kernels_pallas.latent_attention.gpu import latent_attention_gpu
from kernels_pallas.latent_attention.layout import LatentPages
from kernels_pallas.latent_attention.reference import latent_attention_reference
from kernels_pallas.latent_attention.tpu import (
    latent_attention_tpu,
    latent_attention_tpu_interpreted,
    plan_latents_tpu,
)
from kernels_pallas.mesh_axes import HEADS_AXES, dividing_axes, num_parts, over_devices
from kernels_pallas.paged_attention.api import (
    implementation_of,
    planner_of,
    splits_heads,
)
from kernels_pallas.paged_attention.call import AttentionCall, expected_rows

# By the names of paged attention's.
IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, LatentPages]]] = {
    "tpu": latent_attention_tpu,
    "gpu": latent_attention_gpu,
    "reference": latent_attention_reference,
    "tpu_interpret": latent_attention_tpu_interpreted,
    "gpu_interpret": functools.partial(latent_attention_gpu, interpret=True),
}

PLANNERS: dict[str, Callable[..., Any]] = {"tpu": plan_latents_tpu, "tpu_interpret": plan_latents_tpu}


def plan_latent_attention(pages: LatentPages, call: AttentionCall, *, num_tokens: int, num_heads: int) -> Any:
    """Returns the plan of a step for `latent_attention`, as `plan_attention` does for `paged_attention`."""
    plan = planner_of(PLANNERS, call.implementation)
    if plan is None:
        return None
    mesh = call.mesh
    parts = num_parts(mesh, dividing_axes(num_heads, mesh, HEADS_AXES)) if splits_heads(mesh) else 1
    G = num_heads // parts  # the call refuses heads that cannot be split
    return plan(pages, call, num_tokens=num_tokens, num_groups=G)


def latent_attention(
    q: jax.Array, latents: jax.Array, pages: LatentPages, call: AttentionCall
) -> tuple[jax.Array, LatentPages]:
    """Appends the latents of a ragged batch to their pages, and attends to all latents in each row's pages.

    The contract is that of `paged_attention` without window, softcap and sinks, for one KV head with the key
    [latent, rotated key] and the value latent. Queries are absorbed: multiplied by the matrix that would make keys
    of latents. The result, multiplied by the matrix that makes values, is that of the heads.

    Args:
      q: [T, N, R + r] absorbed queries of the R numbers of a latent, then rotated queries of the r of a key.
      latents: [T, R + r] latents of the same tokens, then their rotated keys.
      pages: the pool. Donate it at the outermost `jit`, and it is updated in place.
      call: the rows, and how they attend; without a window and a softcap, and with a plan of `plan_latent_attention`.
        Its mesh splits query heads; each device holds all latents.

    Returns:
      [T, N, R] in q's dtype, and the pool. Values at padding positions mean nothing; they are finite if no q_len above
      1 is given.

    Raises:
      ValueError: for an unknown implementation or arrays that do not fit together.
      NotImplementedError: when the implementation cannot do this call, with the reason.
    """
    _check_call(q, latents, pages, call)
    attend, mesh = implementation_of(IMPLEMENTATIONS, call.implementation, "latent attention"), call.mesh
    if not splits_heads(mesh):
        return attend(q, latents, pages, call)
    axes, last = dividing_axes(q.shape[1], mesh, HEADS_AXES), HEADS_AXES[-1]
    if axes is None and q.shape[1] % mesh.shape.get(last, 1):
        raise ValueError(
            f"{q.shape[1]} query heads cannot be split over the {mesh.shape[last]} devices of mesh axis {last!r}; use a"
            " number of devices that divides them"
        )
    heads, whole = PartitionSpec(None, axes), PartitionSpec()
    specs = {"in_specs": (heads, whole, whole, whole), "out_specs": (heads, whole)}
    return over_devices(attend, mesh, **specs)(q, latents, pages, call)


def _check_call(q: jax.Array, latents: jax.Array, pages: LatentPages, call: AttentionCall) -> None:
    """Raises ValueError, with every shape, if the arrays of a call do not fit together."""
    T, N, _ = q.shape
    expected = {
        "q": (q, (T, N, pages.width)),
        "latents": (latents, (T, pages.width)),
        **expected_rows(call, T),
    }
    wrong = [name for name, (array, shape) in expected.items() if array is not None and array.shape != shape]
    if wrong:
        listed = ", ".join(f"{name} {array.shape}" for name, (array, _) in expected.items() if array is not None)
        raise ValueError(
            f"shapes do not fit together: {listed}, kv_lens {call.kv_lens.shape}, pages of {pages.width} numbers per"
            f" token; wrong: {', '.join(wrong)}; see latent_attention"
        )
    if call.window is not None or call.softcap is not None:
        raise ValueError(f"window={call.window} and softcap={call.softcap} are not for latents; leave them out")
    if jnp.issubdtype(pages.dtype, jnp.integer) and pages.scales is None:
        raise ValueError(f"pages of {pages.dtype} need scales; make the pool with has_scales, or of a floating dtype")
