"""The demo's architecture in PyTorch: Qwen3-MoE, trained on the CPU.

Parameter names are those of a Hugging Face ``qwen3_moe`` checkpoint, except that the experts of a
layer are stacked in one tensor ``[experts, out, in]``, as mlx-lm stacks them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "router_aux_loss_coef": 0.01,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``x`` [batch, heads, length, head_dim], halves convention."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.Module):
    """Root-mean-square norm; the one in PyTorch is slower on the CPU."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        hidden, self.dim = c["hidden_size"], c["head_dim"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.dim, eps=c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.dim, eps=c["rms_norm_eps"])

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, length, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, length, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, length, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, length, -1))


class Experts(nn.Module):
    """The stacked weights of a layer's experts."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        n, hidden, inner = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
        self.gate_proj = nn.Parameter(torch.empty(n, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(n, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(n, hidden, inner))

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """``x`` [rows, hidden], sorted by expert with ``counts`` rows each → the same shape.

        ``unbind`` matters: slicing a stacked parameter makes a gradient of full size for each.
        """
        groups = zip(
            x.split(counts), self.gate_proj.unbind(), self.up_proj.unbind(),
            self.down_proj.unbind(), strict=True,
        )  # fmt: skip
        return torch.cat([(F.silu(r @ g.T) * (r @ u.T)) @ d.T for r, g, u, d in groups])


class SparseMLP(nn.Module):
    """Top-k routed experts; ``balance`` holds the balance loss of the last call."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.n, self.k = c["num_experts"], c["num_experts_per_tok"]
        self.gate = nn.Linear(c["hidden_size"], self.n, bias=False)
        self.switch_mlp = Experts(c)
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        probs = F.softmax(self.gate(x), dim=-1)
        weight, chosen = probs.topk(self.k, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        flat = chosen.reshape(-1)
        counts = torch.bincount(flat, minlength=self.n)
        self.balance = self.n * (counts / flat.numel() * probs.mean(dim=0)).sum()

        order = flat.argsort()
        y = self.switch_mlp(x[order // self.k], counts.tolist())
        y = y * weight.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // self.k, y).view(shape)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = SparseMLP(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Token ids [batch, length] → logits [batch, length, vocabulary]."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        # A token's own embedding must not be drowned by what the layers add to it, or the model
        # learns to copy from its context late: embedding large, layers' outputs small at first,
        # and the last norm makes up for the size of the tied output.
        for name, p in self.named_parameters():
            if p.dim() > 1:
                residual = name.endswith(("o_proj.weight", "down_proj"))
                scale = 0.5 * ((2 * c["num_hidden_layers"]) ** -0.5 if residual else 1.0)
                nn.init.normal_(p, std=scale * p.shape[-1] ** -0.5)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        nn.init.constant_(self.norm.weight, 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        dim = self.config["head_dim"]
        frequency = self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angle = torch.arange(ids.shape[1])[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x) @ self.embed_tokens.weight.T

    def balance(self) -> torch.Tensor:
        """Mean balance loss of the last forward pass over the layers; 1 when even."""
        return torch.stack([layer.mlp.balance for layer in self.layers]).mean()
