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
SHAPE = (2, 3, 6, 6, 8, 8)


def qkv(b: int = 2, h: int = 3, s: int = 6, d: int = 8, s_kv: int = 0, g: int = 0, **options: Any) -> Any:
    def one(heads: int, rows: int) -> Tensor:
        return torch.randn(b, heads, rows, d, **options)

    return one(h, s), one(g or h, s_kv or s), one(g or h, s_kv or s)


def hidden(rows: int = 6, keys: int = 6, first: int = 1) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).triu(first)


def add(
    name: str, run: Callable[..., Any], mask: str = "no_mask", shape: tuple[int, ...] = SHAPE, *,
    scale: float | None = -1.0, made: dict[str, Any] | None = None, **fields: Any,
) -> None:  # fmt: skip
    """``run`` of q, k and v; ``made``: how they are."""
    POSITIVE[name] = Case(lambda: run(*qkv(**(made or {}))), shape, mask, fields, scale)


def positive(mask: str = "no_mask", shape: tuple[int, ...] = SHAPE, **about: Any) -> Any:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        add(function.__name__, function, mask, shape, **about)
        return function

    return decorate


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 8**-0.5


# ---- attention --------------------------------------------------------------------------------------

add("plain", lambda q, k, v: (q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1) @ v)
add("without a scale", lambda q, k, v: torch.softmax(q @ k.mT, dim=3) @ v, scale=1.0)
add("scale in both", lambda q, k, v: torch.softmax((q * 8**-0.25) @ (k * 8**-0.25).mT, -1) @ v)
add("divided at the end", lambda q, k, v: (e := scores_of(q, k).exp()) @ v / e.sum(-1, keepdim=True))
add(
    "exp less logsumexp",
    lambda q, k, v: torch.exp((s := scores_of(q, k)) - s.logsumexp(-1, keepdim=True)) @ v,
)
# Columns are queries.
add("transposed scores", lambda q, k, v: v.mT @ (k @ q.mT * 8**-0.5).softmax(dim=-2))
add(
    "a mask added",
    lambda q, k, v: F.softmax(q @ k.mT / 8**0.5 + torch.full((6, 6), INF).triu(1), dim=-1) @ v,
    "causal",
)
add(
    "a mask that hides nothing",
    lambda q, k, v: F.softmax(scores_of(q, k) + torch.zeros(2, 1, 6, 6), -1) @ v,
    "arbitrary",
    hides_nothing=True,
)
add(
    "cached prefill",
    lambda q, k, v: scores_of(q, k).masked_fill(hidden(4, 7, 4), INF).softmax(-1) @ v,
    "causal_bottom_right",
    (2, 3, 4, 7, 8, 8),
    made={"s": 4, "s_kv": 7},
)
add(
    "all in float32",
    lambda q, k, v: ((q.float() @ k.float().mT * 8**-0.5).softmax(-1) @ v.float()).to(torch.bfloat16),
    made={"dtype": torch.bfloat16},
    dtype="bf16",
)
add(
    "t5's relative bias",
    lambda q, k, v: F.softmax((scores_of(q, k) + torch.randn(1, 3, 6, 6)).float(), dim=-1).type_as(q) @ v,
    core_attention_bias_type="post_scale_bias",
    core_attention_bias_shape="1hss",
)
add(
    "dropout in training",
    lambda q, k, v: F.dropout(scores_of(q, k).softmax(-1), 0.25, training=True) @ v,
    made={"requires_grad": True},
    attention_dropout=0.25,
    is_training=True,
)
add(
    "gemma's softcap",
    lambda q, k, v: (torch.tanh(scores_of(q, k) / 30.0) * 30.0).softmax(-1) @ v,
    softcap=30.0,
)


@positive("causal")
def gpt_2_where(q, k, v):
    causal = torch.tril(torch.ones(6, 6, dtype=torch.bool)).view(1, 1, 6, 6)
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / torch.full([], 8**0.5, dtype=scores.dtype)
    scores = torch.where(causal, scores, torch.full([], torch.finfo(scores.dtype).min))
    return torch.matmul(nn.Dropout(0.0)(F.softmax(scores, dim=-1).type(v.dtype)), v)


@positive("causal")
def gpt_1_times_and_minus(q, k, v):
    """w * b + -1e4 * (1 - b), as the first GPT wrote it."""
    b = torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6)
    w = torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(8)
    w = w * b + -1e4 * (1 - b)
    return torch.matmul(nn.Softmax(dim=-1)(w), v)


@positive("padding")
def bert_additive_padding(q, k, v):
    real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    mask = (1.0 - real[:, None, None, :].float()) * torch.finfo(torch.float32).min
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8) + mask
    return torch.matmul(nn.Dropout(0.0)(nn.functional.softmax(scores, dim=-1)), v)


@positive("padding_causal")
def causal_and_padding(q, k, v):
    pad = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])[:, None, None, :]
    return scores_of(q, k).masked_fill(hidden(), INF).masked_fill(pad, INF).softmax(-1) @ v


@positive("causal", window_size=(2, 0))
def sliding_window(q, k, v):
    i, j = torch.arange(6)[:, None], torch.arange(6)[None, :]
    return scores_of(q, k).masked_fill((j > i) | (j < i - 2), INF).softmax(-1) @ v


@positive("causal", (2, 4, 6, 6, 8, 8), made={"h": 4, "g": 2, "dtype": torch.bfloat16}, num_gqa_groups=2)
def llama_eager(q, k, v):
    """Repeated heads, an added mask, softmax in float32 and a cast back."""
    k, v = (x[:, :, None].expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8) for x in (k, v))
    mask = torch.full((6, 6), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).triu(1)
    weights = torch.matmul(q, k.transpose(2, 3)) * 8**-0.5 + mask[None, None]
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(nn.functional.dropout(weights, 0.0, training=True), v).transpose(1, 2).contiguous()


@positive("no_mask", (2, 4, 6, 6, 8, 8), made={"h": 4, "g": 2}, num_gqa_groups=2)
def grouped_einsum(q, k, v):
    p = torch.einsum("bgnqd,bgkd->bgnqk", q.view(2, 2, 2, 6, 8), k).mul(8**-0.5).softmax(-1)
    return torch.einsum("bgnqk,bgkd->bgnqd", p, v)


@positive()
def softmax_over_an_inner_dimension(q, k, v):
    """[b, q, k, h] scores, as some write them for triangles and pairs."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    p = torch.einsum("bqhd,bkhd->bqkh", q, k).mul(8**-0.5).softmax(dim=2)
    return torch.einsum("bqkh,bkhd->bqhd", p, v)


@positive("no_mask", (6, 1, 6, 6, 8, 8))
def baddbmm_of_diffusers(q, k, v):
    """A processor's scores: baddbmm with an empty input and alpha, beta 0."""
    q, k, v = (x.reshape(6, 6, 8) for x in (q, k, v))
    scores = torch.baddbmm(torch.empty(6, 6, 6), q, k.transpose(-1, -2), beta=0, alpha=8**-0.5)
    return torch.bmm(scores.softmax(dim=-1).to(q.dtype), v)


@positive("no_mask", (6, 1, 6, 6, 8, 8), core_attention_bias_type="alibi")
def bloom_baddbmm(q, k, v):
    q, k, v = (x.reshape(6, 6, 8) for x in (q, k, v))
    slopes = torch.tensor([0.5, 0.25, 0.125]).repeat(2)[:, None, None]
    alibi = slopes * torch.arange(6.0)[None, None, :]
    return alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=8**-0.5).softmax(-1) @ v


@positive(softmax_type="learnable")
def gpt_oss_sinks(q, k, v):
    scores = torch.cat([scores_of(q, k), torch.zeros(1, 3, 1, 1).expand(2, 3, 6, 1)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return F.softmax(scores, dim=-1)[..., :-1] @ v


@positive()
def exp_over_sum(q, k, v):
    scores = scores_of(q, k)
    e = torch.exp(scores - scores.max(dim=-1, keepdim=True)[0])
    return (e / e.sum(dim=-1, keepdim=True)) @ v


@positive("no_mask", (2, 1, 10, 10, 4, 12), scale=1.0)
def sagan_convolutions(*_):
    """[b, c, n] maps: queries are transposed, probabilities are behind the values."""
    q, k, v = torch.randn(2, 4, 10), torch.randn(2, 4, 10), torch.randn(2, 12, 10)
    p = F.softmax(torch.bmm(q.permute(0, 2, 1), k), dim=-1)
    return torch.bmm(v, p.permute(0, 2, 1))


@positive("arbitrary", (4, 3, 6, 6, 8, 8), made={"b": 4}, core_attention_bias_type="post_scale_bias")
def swin_windows(q, k, v):
    """A relative bias, and -100 between pieces of a window, both added."""
    scores = q * 8**-0.5 @ k.mT + torch.randn(3, 6, 6).unsqueeze(0)
    mask = torch.zeros(2, 6, 6)
    mask[1, :3, 3:] = mask[1, 3:, :3] = -100.0
    scores = scores.view(2, 2, 3, 6, 6) + mask.unsqueeze(1).unsqueeze(0)
    return scores.view(4, 3, 6, 6).softmax(-1) @ v


@positive("no_mask", (2, 3, 3, 6, 8, 8))
def sliced(q, k, v):
    """Queries in slices; each slice is a call."""
    out = torch.empty_like(q)
    for rows in (slice(0, 3), slice(3, 6)):
        out[:, :, rows] = scores_of(q[:, :, rows], k).softmax(-1) @ v
    return out


@positive("no_mask", (1, 1, 6, 6, 8, 8), scale=None)
def one_head_and_a_learned_temperature(*_):
    q, k, v = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 8)
    return (q @ k.T * torch.randn(6, 1).exp()).softmax(-1) @ v


# ---- not attention ----------------------------------------------------------------------------------


def negative(function: Callable[[], Any]) -> Callable[[], Any]:
    NEGATIVE[function.__name__] = function
    return function


NEGATIVE["a classifier, then label embeddings"] = lambda: (
    nn.Linear(16, 10)(torch.randn(4, 16)).softmax(-1) @ torch.randn(10, 8)
)
NEGATIVE["cosine similarity"] = lambda: (
    (F.normalize(torch.randn(4, 16)) @ F.normalize(torch.randn(5, 16)).T / 0.07).softmax(-1).argmax(-1)
)
NEGATIVE["relu and not softmax"] = lambda: F.relu(qkv()[0] @ qkv()[1].mT) @ qkv()[2]
NEGATIVE["softmax of something else between products"] = lambda: (
    torch.randn(2, 6, 8) @ torch.randn(2, 8, 8),
    torch.randn(2, 6, 6).softmax(-1) @ torch.randn(2, 6, 8),
)


@negative
def tied_language_model_head():
    embedding = nn.Embedding(50, 16)
    return (torch.randn(2, 4, 16) @ embedding.weight.T).softmax(-1) @ embedding.weight


@negative
def soft_router_with_slots():
    logits = torch.einsum("bnd,sd->bns", torch.randn(2, 6, 16), nn.Parameter(torch.randn(3, 16)))
    return torch.einsum("bns,bsd->bnd", logits.softmax(-1), torch.randn(2, 3, 16))


@negative
def linear_attention():
    q, k, v = qkv()
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


@negative
def performer_features():
    q, k, v = qkv()
    features = torch.randn(16, 8)
    q, k = (torch.exp(torch.einsum("bhid,jd->bhij", x, features)) + 1e-4 for x in (q, k))
    return (q @ (k.mT @ v)) / (q @ k.sum(dim=-2, keepdim=True).mT)


@negative
def graph_attention_of_sums():
    """GAT: scores are sums of two projections, no product of queries and keys."""
    h, a = torch.randn(6, 8), nn.Parameter(torch.randn(8, 1))
    return F.leaky_relu(h @ a + (h @ a).T).softmax(-1) @ h


@negative
def pooling_by_a_score():
    x = torch.randn(2, 6, 8)
    return nn.Linear(8, 1)(x).softmax(dim=1).transpose(1, 2) @ x


@negative
def codebook():
    z, codes = torch.randn(2, 6, 8), nn.Parameter(torch.randn(32, 8))
    return (-(z.pow(2).sum(-1, keepdim=True) - 2 * z @ codes.T + codes.pow(2).sum(-1))).softmax(-1) @ codes
