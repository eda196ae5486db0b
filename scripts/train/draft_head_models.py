"""What drafts from a model's states, as it is trained: tensors, and the states that are unembedded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

    Tensors = dict[str, torch.Tensor]

# The EAGLE-style head: how far it looks back, how wide its MLP is.
ATTENDED, INTERMEDIATE = 16, 512
ROPE_THETA = 10_000.0


class Medusa:
    """Head k has h + silu(W_k [h; e]) for the state h and the embedding e of the token drawn from it."""

    first = 1  # how far behind h the first draft's state is
    has_muon, adamw_lr = False, 5e-3  # whether Muon learns its matrices; AdamW brought these further

    def __init__(self, model: LlamaForCausalLM, num_drafts: int, num_layers: int) -> None:
        self.description = {"num_heads": num_drafts, "hidden_size": model.config.hidden_size}

    def begin(self, model: LlamaForCausalLM) -> Tensors:
        import torch

        D = model.config.hidden_size
        return {f"head{k}": torch.zeros(D, 2 * D) for k in range(self.description["num_heads"])}

    def states(self, tensors: Tensors, layers: list[torch.Tensor], embedded: torch.Tensor) -> list[torch.Tensor]:
        import torch
        from torch.nn.functional import silu

        both = torch.cat([layers[-1], embedded], -1)
        return [layers[-1] + silu(both @ weight.T) for weight in tensors.values()]

    def finished(self, tensors: Tensors) -> Tensors:
        import torch

        return {"weights": torch.stack(list(tensors.values()))}


class Exit:
    """The state after some layers, normed, and a matrix that brings it nearer to the last one (Belrose et al. 2023)."""

    first = 0
    has_muon, adamw_lr = True, 3e-3

    def __init__(self, model: LlamaForCausalLM, num_drafts: int, num_layers: int) -> None:
        self._epsilon = model.config.rms_norm_eps
        self.description = {"num_layers": num_layers, "hidden_size": model.config.hidden_size}

    def begin(self, model: LlamaForCausalLM) -> Tensors:
        import torch

        D = model.config.hidden_size
        return {"norm": model.model.norm.weight.detach().clone(), "lens": torch.zeros(D, D)}

    def states(self, tensors: Tensors, layers: list[torch.Tensor], embedded: torch.Tensor) -> list[torch.Tensor]:
        normed = rms_norm(layers[self.description["num_layers"]], tensors["norm"], self._epsilon)
        return [normed + normed @ tensors["lens"].T]

    def finished(self, tensors: Tensors) -> Tensors:
        return tensors


class Eagle:
    """A decoder layer that goes on from state to state, told each token (EAGLE, Li et al. 2024).

    It is trained on its own states, as it will meet them (Zhang et al. 2024).

    It attends to the last ATTENDED states, and to its own after them.
    """

    first = 1
    has_muon, adamw_lr = True, 3e-3

    def __init__(self, model: LlamaForCausalLM, num_drafts: int, num_layers: int) -> None:
        config = model.config
        self._num_drafts, self._epsilon = num_drafts, config.rms_norm_eps
        self.description = {
            "num_drafts": num_drafts,
            "window": ATTENDED,
            "hidden_size": config.hidden_size,
            "intermediate_size": INTERMEDIATE,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "rope_theta": ROPE_THETA,
            "norm_epsilon": config.rms_norm_eps,
        }

    def begin(self, model: LlamaForCausalLM) -> Tensors:
        import torch

        sizes = self.description
        D, F, H = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
        queries, keys = sizes["num_heads"] * H, sizes["num_kv_heads"] * H
        shapes = {"input": (D, 2 * D), "q": (queries, D), "k": (keys, D), "v": (keys, D), "o": (D, queries)}
        shapes |= {"gate": (F, D), "up": (F, D), "down": (D, F)}
        tensors = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
        tensors |= {name: torch.ones(D) for name in ("embedding_norm", "hidden_norm", "attention_norm", "mlp_norm")}
        return tensors | {"final_norm": model.model.norm.weight.detach().clone()}

    def states(self, tensors: Tensors, layers: list[torch.Tensor], embedded: torch.Tensor) -> list[torch.Tensor]:
        import torch

        hidden, seen, out = layers[-1], [], []
        for step in range(self._num_drafts):
            told = torch.roll(embedded, -step, 1)  # the last of a window are told the first, and not learned from
            hidden = self._layer(tensors, hidden, told, seen, step)
            out.append(hidden)
        return out

    def _layer(self, t: Tensors, hidden: torch.Tensor, told: torch.Tensor, seen: list[Any], step: int) -> torch.Tensor:
        """Returns the states after `hidden` [B, S, D]; appends keys and values to those that the steps before had."""
        import torch
        from torch.nn.functional import silu

        norm = lambda x, name: rms_norm(x, t[name], self._epsilon)  # noqa: E731
        x = torch.cat([norm(told, "embedding_norm"), norm(hidden, "hidden_norm")], -1) @ t["input"].T
        normed = norm(x, "attention_norm")
        positions = torch.arange(x.shape[1]) + step
        q, k, v = (self._heads(normed @ t[name].T) for name in "qkv")
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        groups = q.shape[1] // k.shape[1]
        seen.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        x = x + self._attended(q, seen) @ t["o"].T
        normed = norm(x, "mlp_norm")
        x = x + (silu(normed @ t["gate"].T) * (normed @ t["up"].T)) @ t["down"].T
        return norm(x, "final_norm")

    def _attended(self, q: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        """Attention of q [B, N, S, H] to the states of the text before it, and to its own row of every later step."""
        import torch

        (keys, values), later = seen[0], seen[1:]
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])[None]
        scores = (q @ keys.transpose(2, 3)).masked_fill((distance < 0) | (distance >= ATTENDED), -torch.inf)
        scores = torch.cat([scores, *((q * k).sum(-1, keepdim=True) for k, _ in later)], -1)
        weights = torch.softmax(scores * q.shape[-1] ** -0.5, -1)
        out = weights[..., : len(distance)] @ values
        for i, (_, v) in enumerate(later):
            out = out + weights[..., len(distance) + i, None] * v
        return out.transpose(1, 2).flatten(2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.description["head_dim"])).transpose(1, 2)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        import torch

        H = x.shape[-1]
        frequencies = self.description["rope_theta"] ** (-torch.arange(0, H, 2) / H)
        angles = positions[:, None] * frequencies[None]
        x1, x2 = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)

    def finished(self, tensors: Tensors) -> Tensors:
        heads = (-1, self.description["head_dim"])
        shaped = {name: tensors[name].unflatten(0, heads) for name in "qkv"}
        return tensors | shaped | {"o": tensors["o"].unflatten(1, heads)}


DRAFTERS = {"medusa": Medusa, "eagle": Eagle, "exit": Exit}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    import torch

    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight
