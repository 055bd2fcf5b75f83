"""Attention as people write it by hand, and what looks like it and is none.

Every function takes nothing and runs one forward. ``POSITIVE``: with (b, h, s_q, s_kv, d, d_v), the mask
type, and other fields of the question that have to be found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INF = float("-inf")


class Case(NamedTuple):
    run: Callable[[], Any]
    shape: tuple[int, ...]  # b, h, s_q, s_kv, d, d_v
    mask: str
    fields: dict[str, Any]
    scale: float | None  # -1: 1/sqrt(d)


POSITIVE: dict[str, Case] = {}
NEGATIVE: dict[str, Callable[[], Any]] = {}


def positive(shape: tuple[int, ...], mask: str = "no_mask", *, scale: float | None = -1.0, **fields: Any):
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        POSITIVE[function.__name__] = Case(function, shape, mask, fields, scale)
        return function

    return add


def negative(function: Callable[[], Any]) -> Callable[[], Any]:
    NEGATIVE[function.__name__] = function
    return function


def qkv(b: int = 2, h: int = 3, s: int = 6, d: int = 8, s_kv: int = 0, g: int = 0, **options: Any) -> Any:
    def one(heads: int, rows: int) -> Tensor:
        return torch.randn(b, heads, rows, d, **options)

    return one(h, s), one(g or h, s_kv or s), one(g or h, s_kv or s)


def hidden(s: int = 6) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).triu(1)


SHAPE = (2, 3, 6, 6, 8, 8)

# ---- attention --------------------------------------------------------------------------------------


@positive(SHAPE)
def plain_at():
    q, k, v = qkv()
    return (q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1) @ v


@positive(SHAPE, scale=1.0)
def without_a_scale():
    q, k, v = qkv()
    return torch.softmax(q @ k.mT, dim=3) @ v


@positive(SHAPE)
def scale_in_q():
    q, k, v = qkv()
    q = q * 8**-0.5
    return torch.softmax(q @ k.mT, -1) @ v


@positive(SHAPE)
def scale_in_both():
    q, k, v = qkv()
    return torch.softmax((q * 8**-0.25) @ (k * 8**-0.25).mT, -1) @ v


@positive(SHAPE, "causal")
def masked_fill_in_place():
    q, k, v = qkv()
    scores = q @ k.mT
    scores *= 8**-0.5
    scores.masked_fill_(hidden(), -1e9)
    return scores.softmax(-1) @ v


@positive(SHAPE, "causal")
def nano_gpt_tril():
    """A character model's blocks: a buffer of ones, and rows where it is 0."""
    q, k, v = qkv()
    tril = torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16)
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(tril[:, :, :6, :6] == 0, INF)
    return (F.dropout(F.softmax(scores, dim=-1), 0.0) @ v).transpose(1, 2).contiguous().view(2, 6, 24)


@positive(SHAPE, "causal")
def added_mask():
    q, k, v = qkv()
    mask = torch.full((6, 6), INF).triu(1)
    return F.softmax(q @ k.mT / 8**0.5 + mask, dim=-1) @ v


@positive(SHAPE, "causal")
def gpt_2_where():
    q, k, v = qkv()
    causal = torch.tril(torch.ones(6, 6, dtype=torch.bool)).view(1, 1, 6, 6)
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / torch.full([], 8**0.5, dtype=scores.dtype)
    scores = torch.where(causal, scores, torch.full([], torch.finfo(scores.dtype).min))
    return torch.matmul(nn.Dropout(0.0)(F.softmax(scores, dim=-1).type(v.dtype)), v)


@positive(SHAPE, "causal")
def gpt_1_times_and_minus():
    """w * b + -1e4 * (1 - b), as the first GPT wrote it."""
    q, k, v = qkv()
    b = torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6)
    w = torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(8)
    w = w * b + -1e4 * (1 - b)
    return torch.matmul(nn.Softmax(dim=-1)(w), v)


@positive(SHAPE, "padding")
def bert_additive_padding():
    q, k, v = qkv()
    real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    mask = (1.0 - real[:, None, None, :].float()) * torch.finfo(torch.float32).min
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8) + mask
    return torch.matmul(nn.Dropout(0.0)(nn.functional.softmax(scores, dim=-1)), v)


@positive(SHAPE, "arbitrary", hides_nothing=True)
def a_mask_that_hides_nothing():
    q, k, v = qkv()
    return F.softmax(q @ k.mT * 8**-0.5 + torch.zeros(2, 1, 6, 6), -1) @ v


@positive(SHAPE, "padding_causal")
def causal_and_padding():
    q, k, v = qkv()
    pad = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])[:, None, None, :]
    scores = (q @ k.mT * 8**-0.5).masked_fill(hidden(), INF).masked_fill(pad, INF)
    return scores.softmax(-1) @ v


@positive(SHAPE, "causal", window_size=(2, 0))
def sliding_window():
    q, k, v = qkv()
    i, j = torch.arange(6)[:, None], torch.arange(6)[None, :]
    return (q @ k.mT * 8**-0.5).masked_fill((j > i) | (j < i - 2), INF).softmax(-1) @ v


@positive((2, 3, 4, 7, 8, 8), "causal_bottom_right")
def cached_prefill():
    q, k, v = qkv(s=4, s_kv=7)
    mask = torch.ones(4, 7, dtype=torch.bool).triu(4)
    return (q @ k.mT * 8**-0.5).masked_fill(mask, INF).softmax(-1) @ v


@positive((2, 4, 6, 6, 8, 8), "causal", num_gqa_groups=2)
def llama_eager():
    """Repeated heads, an added mask, softmax in float32 and a cast back."""
    q, k, v = qkv(h=4, g=2, dtype=torch.bfloat16)

    def repeat(x: Tensor) -> Tensor:
        b, g, s, d = x.shape
        return x[:, :, None].expand(b, g, 2, s, d).reshape(b, g * 2, s, d)

    k, v = repeat(k), repeat(v)
    mask = torch.full((6, 6), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).triu(1)
    weights = torch.matmul(q, k.transpose(2, 3)) * 8**-0.5 + mask[None, None]
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(nn.functional.dropout(weights, 0.0, training=True), v).transpose(1, 2).contiguous()


@positive((2, 4, 6, 6, 8, 8), num_gqa_groups=2)
def grouped_einsum():
    q, k, v = qkv(h=4, g=2)
    q = q.view(2, 2, 2, 6, 8)
    p = torch.einsum("bgnqd,bgkd->bgnqk", q, k).mul(8**-0.5).softmax(-1)
    return torch.einsum("bgnqk,bgkd->bgnqd", p, v)


@positive(SHAPE, dtype="bf16")
def all_in_float32():
    q, k, v = qkv(dtype=torch.bfloat16)
    p = (q.float() @ k.float().mT * 8**-0.5).softmax(-1)
    return (p @ v.float()).to(torch.bfloat16)


@positive(SHAPE)
def lucidrains_einsum():
    q, k, v = qkv()
    sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 8**-0.5
    sim = sim - sim.amax(dim=-1, keepdim=True).detach()
    return torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)


@positive(SHAPE)
def softmax_over_an_inner_dimension():
    """[b, q, k, h] scores, as some write them for triangles and pairs."""
    q, k, v = (x.transpose(1, 2) for x in qkv())
    p = torch.einsum("bqhd,bkhd->bqkh", q, k).mul(8**-0.5).softmax(dim=2)
    return torch.einsum("bqkh,bkhd->bqhd", p, v)


@positive((6, 1, 6, 6, 8, 8))
def baddbmm_of_diffusers():
    """A processor's scores: baddbmm with an empty input and alpha, beta 0."""
    q, k, v = (x.reshape(6, 6, 8) for x in qkv())
    scores = torch.baddbmm(torch.empty(6, 6, 6), q, k.transpose(-1, -2), beta=0, alpha=8**-0.5)
    return torch.bmm(scores.softmax(dim=-1).to(q.dtype), v)


@positive((6, 1, 6, 6, 8, 8), core_attention_bias_type="alibi")
def bloom_baddbmm():
    q, k, v = (x.reshape(6, 6, 8) for x in qkv())
    slopes = torch.tensor([0.5, 0.25, 0.125]).repeat(2)[:, None, None]
    alibi = slopes * torch.arange(6.0)[None, None, :]
    return alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=8**-0.5).softmax(-1) @ v


@positive(SHAPE, core_attention_bias_type="post_scale_bias", core_attention_bias_shape="1hss")
def t5_relative_bias():
    q, k, v = qkv()
    bias = torch.randn(1, 3, 6, 6)
    return F.softmax((q @ k.mT * 8**-0.5 + bias).float(), dim=-1).type_as(q) @ v


@positive(SHAPE, core_attention_bias_type="alibi")
def alibi_with_a_causal_mask():
    q, k, v = qkv()
    slopes = torch.tensor([0.5, 0.25, 0.125]).view(3, 1, 1)
    bias = slopes * (torch.arange(6)[None, :] - torch.arange(6)[:, None])
    return torch.softmax(q @ k.mT * 8**-0.5 + bias[None], -1) @ v


@positive(SHAPE, attention_dropout=0.25, is_training=True)
def dropout_in_training():
    q, k, v = qkv(requires_grad=True)
    return F.dropout((q @ k.mT * 8**-0.5).softmax(-1), 0.25, training=True) @ v


@positive(SHAPE, softcap=30.0)
def gemma_softcap():
    q, k, v = qkv()
    scores = q @ k.mT * 8**-0.5
    return (torch.tanh(scores / 30.0) * 30.0).softmax(-1) @ v


@positive(SHAPE, softmax_type="learnable")
def gpt_oss_sinks():
    q, k, v = qkv()
    scores = torch.cat([q @ k.mT * 8**-0.5, torch.zeros(1, 3, 1, 1).expand(2, 3, 6, 1)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return F.softmax(scores, dim=-1)[..., :-1] @ v


@positive(SHAPE)
def exp_over_sum():
    q, k, v = qkv()
    scores = q @ k.mT * 8**-0.5
    e = torch.exp(scores - scores.max(dim=-1, keepdim=True)[0])
    return (e / e.sum(dim=-1, keepdim=True)) @ v


@positive(SHAPE)
def divided_at_the_end():
    q, k, v = qkv()
    e = (q @ k.mT * 8**-0.5).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


@positive(SHAPE)
def exp_less_logsumexp():
    q, k, v = qkv()
    scores = q @ k.mT * 8**-0.5
    return torch.exp(scores - scores.logsumexp(-1, keepdim=True)) @ v


@positive(SHAPE)
def transposed_scores():
    """softmax(K Q^T) over keys, and V^T P: columns are queries."""
    q, k, v = qkv()
    p = (k @ q.mT * 8**-0.5).softmax(dim=-2)
    return v.mT @ p


@positive((2, 1, 10, 10, 4, 12), scale=1.0)
def sagan_convolutions():
    """[b, c, n] maps: queries are transposed, probabilities are behind the values."""
    q, k, v = torch.randn(2, 4, 10), torch.randn(2, 4, 10), torch.randn(2, 12, 10)
    p = F.softmax(torch.bmm(q.permute(0, 2, 1), k), dim=-1)
    return torch.bmm(v, p.permute(0, 2, 1))


@positive((4, 3, 6, 6, 8, 8), "arbitrary", core_attention_bias_type="post_scale_bias")
def swin_windows():
    """A relative bias, and -100 between pieces of a window, both added."""
    q, k, v = qkv(b=4)
    scores = q * 8**-0.5 @ k.mT + torch.randn(3, 6, 6).unsqueeze(0)
    mask = torch.zeros(2, 6, 6)
    mask[1, :3, 3:] = mask[1, 3:, :3] = -100.0
    scores = scores.view(2, 2, 3, 6, 6) + mask.unsqueeze(1).unsqueeze(0)
    return scores.view(4, 3, 6, 6).softmax(-1) @ v


@positive((2, 3, 3, 6, 8, 8))
def sliced():
    """Queries in slices; each slice is a call."""
    q, k, v = qkv()
    out = torch.empty_like(q)
    for rows in (slice(0, 3), slice(3, 6)):
        out[:, :, rows] = (q[:, :, rows] @ k.mT * 8**-0.5).softmax(-1) @ v
    return out


@positive((1, 1, 6, 6, 8, 8), scale=None)
def one_head_and_a_learned_temperature():
    q, k, v = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 8)
    scores = q @ k.T * torch.randn(6, 1).exp()
    return scores.softmax(-1) @ v


# ---- not attention ----------------------------------------------------------------------------------


@negative
def classifier_then_label_embeddings():
    p = nn.Linear(16, 10)(torch.randn(4, 16)).softmax(-1)
    return p @ torch.randn(10, 8)


@negative
def tied_language_model_head():
    embedding = nn.Embedding(50, 16)
    p = (torch.randn(2, 4, 16) @ embedding.weight.T).softmax(-1)
    return p @ embedding.weight


@negative
def router_of_experts():
    x = torch.randn(2, 6, 16)
    weights, chosen = torch.topk(nn.Linear(16, 4, bias=False)(x).softmax(-1), 2)
    return (torch.randn(2, 6, 2, 16) * weights[..., None]).sum(-2), chosen


@negative
def soft_router_with_slots():
    x, slots = torch.randn(2, 6, 16), nn.Parameter(torch.randn(3, 16))
    logits = torch.einsum("bnd,sd->bns", x, slots)
    return torch.einsum("bns,bsd->bnd", logits.softmax(-1), torch.randn(2, 3, 16))


@negative
def linear_attention():
    q, k, v = qkv()
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


@negative
def performer_features():
    q, k, v = qkv()
    features = torch.randn(16, 8)
    q = torch.exp(torch.einsum("bhid,jd->bhij", q, features)) + 1e-4
    k = torch.exp(torch.einsum("bhid,jd->bhij", k, features)) + 1e-4
    return (q @ (k.mT @ v)) / (q @ k.sum(dim=-2, keepdim=True).mT)


@negative
def cosine_similarity():
    a, b = F.normalize(torch.randn(4, 16), dim=-1), F.normalize(torch.randn(5, 16), dim=-1)
    return (a @ b.T / 0.07).softmax(-1).argmax(-1)


@negative
def log_softmax_then_a_product():
    q, k, v = qkv()
    return F.log_softmax(q @ k.mT, dim=-1) @ v


@negative
def relu_and_not_softmax():
    q, k, v = qkv()
    return F.relu(q @ k.mT) @ v


@negative
def graph_attention_of_sums():
    """GAT: scores are sums of two projections, no product of queries and keys."""
    h, a = torch.randn(6, 8), nn.Parameter(torch.randn(8, 1))
    return F.leaky_relu(h @ a + (h @ a).T).softmax(-1) @ h


@negative
def pooling_by_a_score():
    x = torch.randn(2, 6, 8)
    p = nn.Linear(8, 1)(x).softmax(dim=1)
    return p.transpose(1, 2) @ x


@negative
def codebook():
    z, codes = torch.randn(2, 6, 8), nn.Parameter(torch.randn(32, 8))
    return (-(z.pow(2).sum(-1, keepdim=True) - 2 * z @ codes.T + codes.pow(2).sum(-1))).softmax(-1) @ codes


@negative
def softmax_of_something_else_between_products():
    a, b = torch.randn(2, 6, 8), torch.randn(2, 8, 8)
    _ = a @ b
    return torch.randn(2, 6, 6).softmax(-1) @ torch.randn(2, 6, 8)
