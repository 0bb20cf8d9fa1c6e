"""Small programs, each with what a graph of it must do: the same table for every backend.

A program is a function of a list of tensors. It may write them, and what it returns and what it
wrote are both compared. Nothing here knows which backend runs it. What CUDA refuses was read off a
GPU, and the same table is run there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs
import torch
import torch.nn.functional as F

Tensors = list[torch.Tensor]
Make = Callable[[torch.Generator], Tensors]


@attrs.frozen
class Program:
    name: str
    body: Callable[[Tensors], Any]
    inputs: Make
    kind: Literal["ok", "random", "refused"] = "ok"
    modes: tuple[str, ...] = ("no_grad", "inference_mode")
    """What the body is run in; one is given where PyTorch itself fails in the other."""


def floats(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Make:
    """Normal floats."""
    return lambda g: [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def whole(*shapes: tuple[int, ...]) -> Make:
    """Floats that are small integers: their sums are exact, in whatever order they are added."""
    return lambda g: [torch.randint(-8, 9, shape, generator=g).float() for shape in shapes]


def ints(*shapes: tuple[int, ...], high: int = 8, dtype: torch.dtype = torch.int64) -> Make:
    """Integers in [0, high)."""
    return lambda g: [torch.randint(0, high, shape, generator=g).to(dtype) for shape in shapes]


def both(*makes: Make) -> Make:
    """The inputs of several makers, one after the other."""
    return lambda g: [tensor for make in makes for tensor in make(g)]


def distinct(rows: int, high: int) -> Make:
    """`rows` different integers in [0, high): an index by which every place is written once."""
    return lambda g: [torch.randperm(high, generator=g)[:rows]]


def constant(*tensors: torch.Tensor) -> Make:
    """The same values every time."""
    return lambda g: [tensor.clone() for tensor in tensors]


X = floats((4, 8))
XY = floats((4, 8), (4, 8))


# Custom operators: declared honestly, writing what they don't declare, returning their argument.


@torch.library.custom_op("graphkit_tests::scale_into", mutates_args={"out"})
def scale_into(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    out.copy_(x * factor)


@torch.library.custom_op("graphkit_tests::softplus_pair", mutates_args=())
def softplus_pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.softplus(x), F.softplus(-x)


_LIBRARY = torch.library.Library("graphkit_unsaid", "DEF")
_LIBRARY.define("bump(Tensor x) -> Tensor")
_LIBRARY.define("same(Tensor x) -> Tensor")


def _bump(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("bump", _bump, _key)
    _LIBRARY.impl("same", _same, _key)


def custom_mutates(t: Tensors) -> Any:
    out = torch.empty_like(t[0])
    scale_into(t[0], out, 3.0)
    return out + 1


def custom_writes_input(t: Tensors) -> Any:
    scale_into(t[0], t[1], 0.5)
    return t[1].sum(0)


def custom_unsaid(t: Tensors) -> Any:
    return torch.ops.graphkit_unsaid.bump(t[0]) + t[0]


def custom_aliases(t: Tensors) -> Any:
    return torch.ops.graphkit_unsaid.same(t[0]) + 1


# In place, and views in place.


def counter(t: Tensors) -> Any:
    t[0] += 1
    return t[0] * 2


def chain_in_place(t: Tensors) -> Any:
    x = t[0].clone()
    x.mul_(2).add_(t[1]).relu_()
    x.sub_(0.5)
    return x


def out_variant(t: Tensors) -> Any:
    out = torch.empty_like(t[0])
    torch.mul(t[0], t[1], out=out)
    torch.add(out, 1, out=out)
    return out


def out_resized(t: Tensors) -> Any:
    out = torch.empty(0, dtype=t[0].dtype, device=t[0].device)
    torch.add(t[0], t[1], out=out)
    return out * 2


def out_slice(t: Tensors) -> Any:
    buffer = torch.zeros(8, 8, device=t[0].device)
    torch.matmul(t[0], t[0].t(), out=buffer.view(-1)[:16].view(4, 4))
    return buffer


def transposed_in_place(t: Tensors) -> Any:
    x = t[0] + 1
    y = x * 2
    x.t_()
    x.mul_(3)
    return x @ y, x


def squeezed_in_place(t: Tensors) -> Any:
    x = t[0].unsqueeze(0) * 2
    x.squeeze_(0)
    x.unsqueeze_(-1)
    x.add_(1)
    return x


def resized(t: Tensors) -> Any:
    x = torch.empty(0, device=t[0].device)
    x.resize_(4, 8)
    x.copy_(t[0])
    return x.sum(0)


def set_to(t: Tensors) -> Any:
    x = torch.empty(0, device=t[0].device)
    x.set_(t[0] * 2)
    return x + 1


def strided_again(t: Tensors) -> Any:
    x = t[0] * 2
    y = x.as_strided((3, 4), (8, 2), 1)
    y.add_(1)
    x.as_strided_((8, 4), (4, 1))
    return x * 1, y


def metadata_after_use(t: Tensors) -> Any:
    x = t[0] * 1
    y = x.sum(1)
    x.transpose_(0, 1)
    return x.sum(1), y


def slices(t: Tensors) -> Any:
    x = t[0].clone()
    x[1:3, ::2] = t[1][1:3, ::2]
    x[0] = 5.0
    x[:, -1] += 1
    return x, x[2:].clone()


def list_of_views(t: Tensors) -> Any:
    a, b = t[0].chunk(2, dim=1)
    c = torch.stack(t[0].unbind(0))
    a.add_(b)
    return a * 2, c, [part * 2 for part in t[1].split([1, 3])]


# Shapes: view or copy, by strides.


def reshaped(t: Tensors) -> Any:
    return t[0].reshape(-1), t[0].t().reshape(-1) * 2, t[0].t().flatten(), t[0].flatten()


def reshaped_view_written(t: Tensors) -> Any:
    x = t[0] * 1
    x.reshape(2, 16).add_(1)
    x.t().reshape(-1).add_(100)
    return x


def expanded(t: Tensors) -> Any:
    wide = t[0][:1].expand(4, 8)
    return wide, wide + t[1], t[0].broadcast_to(2, 4, 8).sum(0)


def contiguous(t: Tensors) -> Any:
    return t[0].contiguous(), t[0].t().contiguous(), t[0].t().clone()


def moved(t: Tensors) -> Any:
    x = t[0].view(2, 2, 8)
    return (
        x.permute(2, 0, 1) * 1,
        x.movedim(0, 2) + 1,
        x.flip(1),
        x.roll(1, 0),
        x.transpose(0, 1).tile(2),
    )


def complex_numbers(t: Tensors) -> Any:
    z = torch.complex(t[0], t[1])
    return z.conj(), z.conj() * z, z.imag * 2, torch.view_as_real(z.conj().resolve_conj())


def negative_view(t: Tensors) -> Any:
    return torch.complex(t[0], t[1]).conj().imag, t[0] * 1


def dtypes(t: Tensors) -> Any:
    half = t[0].to(torch.bfloat16)
    return half, half.float() * 2, t[0].int(), t[0] > 0, t[0].double().to(t[1].dtype), t[0].half()


def promotion(t: Tensors) -> Any:
    i = t[1]
    return i * 2.5, i / 2, i + t[0], i.float().mean(), torch.sqrt(i), i // 3, i % 3, 2**i


def factories(t: Tensors) -> Any:
    d = t[0].device
    x = torch.zeros(4, 8, device=d)
    x += t[0]
    y = torch.arange(8, device=d, dtype=torch.float32)
    y.mul_(t[0][0])
    z = torch.full((4,), 2.0, device=d)
    z[1:] *= t[0][1:, 0]
    ones = torch.ones_like(t[0]) + t[0]
    return x, y, z, ones, torch.linspace(0, 1, 5, device=d), torch.eye(4, device=d) @ t[0]


def scalar_constant(t: Tensors) -> Any:
    return t[0] * torch.tensor(3.0) + torch.tensor(2)


def where_scalar(t: Tensors) -> Any:
    return (
        torch.where(t[0] > 0, t[0], 0.0),
        torch.where(t[0] > t[1], 1, 0),
        t[0].masked_fill(t[0] < 0, 7),
    )


def masked_assign(t: Tensors) -> Any:
    x = t[0].clone()
    x[x > 0] = 1.0
    return x


# Many tensors at once.


def foreach(t: Tensors) -> Any:
    new = torch._foreach_add(t[:2], 1.0)
    torch._foreach_mul_(new, t[:2])
    torch._foreach_copy_([t[2]], [new[0]])
    return new


def foreach_norm(t: Tensors) -> Any:
    return torch._foreach_norm(t)


# Neural networks.


def linear(t: Tensors) -> Any:
    return F.linear(t[0], t[1], t[2])


def mlp(t: Tensors) -> Any:
    h = F.silu(t[0] @ t[1]) * torch.sigmoid(t[0] @ t[1])
    return F.gelu(h @ t[1].t(), approximate="tanh")


def layer_norm(t: Tensors) -> Any:
    return F.layer_norm(t[0], (8,), t[1][0], t[1][1]), F.group_norm(t[0].view(1, 4, 8), 2)


def rms_norm(t: Tensors) -> Any:
    x = t[0]
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), F.rms_norm(x, (8,))


def batch_norm(t: Tensors) -> Any:
    x, mean, variance = t
    return F.batch_norm(x, mean, variance, training=True), F.batch_norm(x, mean, variance)


def instance_norm(t: Tensors) -> Any:
    return F.instance_norm(t[0], t[1], t[2], use_input_stats=True)


def softmax(t: Tensors) -> Any:
    return t[0].softmax(-1), t[0].log_softmax(0), torch.logsumexp(t[0], 1)


def attention(t: Tensors) -> Any:
    q, k, v = t
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_masked(t: Tensors) -> Any:
    q, k, v, lengths = t
    keep = torch.arange(k.shape[-2], device=k.device) < lengths[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])


def attention_by_hand(t: Tensors) -> Any:
    q, k, v = t
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 2
    mask = torch.ones(4, 4, dtype=torch.bool, device=q.device).tril()
    return torch.einsum("bhij,bhjd->bhid", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def kv_cache(t: Tensors) -> Any:
    cache, slots, new = t
    cache[slots] = new
    cache.index_copy_(0, slots, new * 2)
    return cache.index_select(0, slots), cache[slots] + 1


def rotary(t: Tensors) -> Any:
    positions, x = t
    angles = positions[:, None].float() * torch.pow(10.0, -torch.arange(4, device=x.device) / 4)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def embedding(t: Tensors) -> Any:
    return F.embedding(t[0], t[1]), t[1][t[0]], F.embedding_bag(t[0].view(2, 2), t[1], mode="sum")


def one_hot(t: Tensors) -> Any:
    return F.one_hot(t[0], 8), F.one_hot(t[0], num_classes=9).float() * 2


def convolution(t: Tensors) -> Any:
    y = F.conv1d(t[0].view(1, 4, 8), t[1].view(4, 4, 2))
    return (
        F.max_pool1d(y, 2),
        F.avg_pool1d(y, 2),
        F.interpolate(y, scale_factor=2.0),
        F.pad(y, (1, 1)),
    )


def losses(t: Tensors) -> Any:
    return F.cross_entropy(t[0], t[1], reduction="none"), F.mse_loss(
        t[0], t[0] * 2, reduction="none"
    )


def autocast(t: Tensors) -> Any:
    with torch.autocast(t[0].device.type, dtype=torch.bfloat16):
        return F.linear(t[0], t[1]), t[0] @ t[1].t(), (t[0] @ t[1].t()).softmax(-1)


def inner_modes(t: Tensors) -> Any:
    x = t[0] * 2
    with torch.inference_mode():
        y = x.reshape(-1) + 1
        y.add_(1)
        with torch.no_grad():
            z = F.linear(t[0], t[1])
        z.mul_(2)
    return y * 1, z.clone(), x


def recurrent(t: Tensors) -> Any:
    h = t[0]
    for _ in range(3):
        h = torch.tanh(h @ t[1])
    return h


# Sorting, gathering, scattering.


def sort(t: Tensors) -> Any:
    return (*t[0].sort(stable=True, dim=-1), t[0].argsort(dim=-1, stable=True), *t[0].sort(0, True))


def topk(t: Tensors) -> Any:
    return (*t[0].topk(3), t[0].argmax(-1), *t[0].max(0), t[0].amin(1), *t[0].kthvalue(2))


def cumulative(t: Tensors) -> Any:
    return t[0].cumsum(0), t[0].cummax(1), t[0].diff(), torch.searchsorted(t[1], t[0])


def gather(t: Tensors) -> Any:
    return t[0].gather(0, t[1]), torch.take_along_dim(t[0], t[1], 0), t[0].take(t[1])


def scatter(t: Tensors) -> Any:
    x, index, source = t
    y = x.scatter(0, index, source)
    y.scatter_(0, index, 1.0)
    return (
        y,
        torch.zeros_like(x).scatter_add(0, index, source),
        x.scatter_reduce(0, index, source, "amax"),
    )


def index_put(t: Tensors) -> Any:
    x, index, source = t
    x.index_put_((index,), source)
    x.index_add_(0, index, source)
    return x.index_put((index,), source, accumulate=True), x.index_fill(0, index, 3.0)


def integer_index(t: Tensors) -> Any:
    x, index = t
    return x[index], x[:, index], x[index[:2], index[2:4]], x[index, 1:3], x[None, index]


def byte_shift(t: Tensors) -> Any:
    return t[0] << 2, t[0] & 3, t[0] ^ t[0].flip(0), t[0].bitwise_not()


def masked_scatter(t: Tensors) -> Any:
    return t[0].masked_scatter(t[0] > 0, t[1])


def static_nonzero(t: Tensors) -> Any:
    return torch.nonzero_static(t[0] > 0, size=12)


def repeats(t: Tensors) -> Any:
    return (
        t[0].repeat_interleave(2, dim=0),
        t[0].repeat_interleave(t[1], dim=0, output_size=6),
        t[0].repeat(2, 1),
    )


def bucketize(t: Tensors) -> Any:
    return torch.bucketize(t[0], t[1]), t[0].clamp(-1, 1), t[0].clamp(min=t[0].mean())


def norms(t: Tensors) -> Any:
    return t[0].norm(), torch.linalg.vector_norm(t[0], 1, dim=0), t[0].std(0), t[0].var(1)


def joined(t: Tensors) -> Any:
    return (
        torch.cat(t),
        torch.stack(t, 1),
        torch.hstack(t),
        torch.einsum("ij,kj->ik", *t),
        torch.kron(*t),
    )


def triangle(t: Tensors) -> Any:
    return t[0].tril(), t[0].triu(1), t[0].diag(), t[0].diagonal() + 1, t[0].fill_diagonal_(3)


def quantile(t: Tensors) -> Any:
    return t[0].quantile(0.5), t[0].median(1), t[0].nanmean()


def addmm(t: Tensors) -> Any:
    return torch.addmm(t[2], t[0], t[1]), torch.baddbmm(*(x[None] for x in (t[2], t[0], t[1])))


def empty_batch(t: Tensors) -> Any:
    return t[0][:0] * 2, t[0][:0].sum(), torch.cat([t[0][:0], t[0]])


def swapped(t: Tensors) -> Any:
    a, b = t
    previous = a.clone()
    a.copy_(b)
    b.copy_(previous)
    return a - b


def nothing_new(t: Tensors) -> Any:
    return t[0].view(8, 4), t[0]


def same_twice(t: Tensors) -> Any:
    x = t[0] * 2
    return x, x, x[1:]


def polyak(t: Tensors) -> Any:
    average, x = t
    average.lerp_(x, 0.25)
    return average.clone()


def fft(t: Tensors) -> Any:
    return torch.fft.rfft(t[0]).abs(), torch.fft.irfft(torch.fft.rfft(t[0]))


# Random.


def rand(t: Tensors) -> Any:
    d = t[0].device
    return torch.rand(64, device=d), torch.randn(64, device=d), torch.rand_like(t[0]) + 0 * t[0]


def in_place_random(t: Tensors) -> Any:
    x = torch.empty(64, device=t[0].device)
    return x.uniform_().clone(), x.normal_().clone(), x.exponential_().clone()


def dropout(t: Tensors) -> Any:
    x = torch.ones(512, device=t[0].device)
    return F.dropout(x, 0.5), F.dropout(x, 0.25, training=True).mul_(2)


def gumbel(t: Tensors) -> Any:
    noise = torch.empty(64, device=t[0].device).exponential_()
    return (t[0].view(-1)[:1] + noise).argsort(), torch.bernoulli(
        torch.full((256,), 0.5, device=noise.device)
    )


def randint(t: Tensors) -> Any:
    return torch.randint(0, 1000, (64,), device=t[0].device)


# What a capture refuses.


def item(t: Tensors) -> Any:
    return t[0] * t[0].sum().item()


def branch(t: Tensors) -> Any:
    if t[0].sum() > 0:
        return t[0] + 1
    return t[0] - 1


def as_float(t: Tensors) -> Any:
    return t[0] * float(t[0].max())


def as_int(t: Tensors) -> Any:
    return t[0] * int(t[0].max())


def as_index(t: Tensors) -> Any:
    return t[0][: t[1][0]]


def select_by_tensor(t: Tensors) -> Any:
    return t[0][t[1][0]]


def tolist(t: Tensors) -> Any:
    return t[0] * t[0].tolist()[0][0]


def host(t: Tensors) -> Any:
    return t[0].cpu()


def numpy(t: Tensors) -> Any:
    return t[0] * float(t[0].detach().cpu().numpy().sum())


def nonzero(t: Tensors) -> Any:
    return (t[0] > 0).nonzero()


def nonzero_tuple(t: Tensors) -> Any:
    return (t[0] > 0).nonzero(as_tuple=True)


def where_condition(t: Tensors) -> Any:
    return torch.where(t[0] > 0)


def argwhere(t: Tensors) -> Any:
    return torch.argwhere(t[0] > 0)


def masked_select(t: Tensors) -> Any:
    return t[0].masked_select(t[0] > 0)


def mask_index(t: Tensors) -> Any:
    return t[0][t[0] > 0]


def mask_row_index(t: Tensors) -> Any:
    return t[0][:, t[0][0] > 0]


def mask_assign_tensor(t: Tensors) -> Any:
    t[0][t[0] > 0] = t[1][t[0] > 0]
    return t[0]


def mask_put(t: Tensors) -> Any:
    return t[0].index_put_((t[0] > 0,), t[0].sum())


def unique(t: Tensors) -> Any:
    return torch.unique(t[0])


def unique_consecutive(t: Tensors) -> Any:
    return torch.unique_consecutive(t[0])


def unique_rows(t: Tensors) -> Any:
    return torch.unique(t[0], dim=0)


def repeat_by_tensor(t: Tensors) -> Any:
    return t[0].repeat_interleave(t[1].abs(), dim=0)


def split_by_tensor(t: Tensors) -> Any:
    return torch.tensor_split(t[0], t[1].cpu())


def equal(t: Tensors) -> Any:
    return t[0] * int(torch.equal(t[0], t[1]))


def allclose(t: Tensors) -> Any:
    return t[0] * int(torch.allclose(t[0], t[1]))


def is_nonzero(t: Tensors) -> Any:
    return t[0] * int(torch.is_nonzero(t[0][0, 0]))


def contains(t: Tensors) -> Any:
    return t[0] * int(3.0 in t[0])


def from_list(t: Tensors) -> Any:
    return t[0] + torch.tensor([1.0] * 8, device=t[0].device)


def from_list_as(t: Tensors) -> Any:
    return t[0] + torch.as_tensor([1.0] * 8, device=t[0].device)


def new_from_list(t: Tensors) -> Any:
    return t[0] + t[0].new_tensor([1.0] * 8)


def list_index(t: Tensors) -> Any:
    return t[0][[0, 2]]


def list_index_assign(t: Tensors) -> Any:
    t[0][[0, 2]] = 1.0
    return t[0]


def bincount(t: Tensors) -> Any:
    return torch.bincount(t[0])


def one_hot_unbounded(t: Tensors) -> Any:
    return F.one_hot(t[0])


def cond(t: Tensors) -> Any:
    return torch.cond(t[0].sum() > 0, lambda x: x + 1, lambda x: x - 1, (t[0],))


def inverse(t: Tensors) -> Any:
    return torch.linalg.inv(t[0] @ t[0].t() + torch.eye(4, device=t[0].device))


def combinations(t: Tensors) -> Any:
    return torch.combinations(t[0][0])


def printed(t: Tensors) -> Any:
    return t[0] * len(f"{t[0]}")


def foreign_generator(t: Tensors) -> Any:
    generator = torch.Generator(device=t[0].device)
    return torch.rand(8, generator=generator, device=t[0].device)


def fill_by_host_scalar(t: Tensors) -> Any:
    value = torch.tensor(-7.0)
    return t[0].masked_fill(t[0] > 0, value) * torch.tensor(2).item()


def fill_by_tensor(t: Tensors) -> Any:
    return t[0].masked_fill(t[0] > 0, t[0].sum())


def full_of_tensor(t: Tensors) -> Any:
    return torch.full((4,), t[0].sum(), device=t[0].device)


def multinomial(t: Tensors) -> Any:
    return torch.multinomial(t[0].softmax(-1), 1)


def multinomial_replaced(t: Tensors) -> Any:
    return torch.multinomial(t[0].softmax(-1), 64, replacement=True)


def randperm(t: Tensors) -> Any:
    return torch.randperm(64, device=t[0].device)


def normal_by_tensors(t: Tensors) -> Any:
    return torch.normal(t[0], t[0].abs())


def histogram(t: Tensors) -> Any:
    return torch.histc(t[0], 8, min=-1, max=1)


def histogram_unbounded(t: Tensors) -> Any:
    return torch.histc(t[0], 8)


def quantile_by_tensor(t: Tensors) -> Any:
    return t[0].quantile(t[1][0, :2].sigmoid(), dim=0)


def mode(t: Tensors) -> Any:
    return t[0].mode(-1)


def sample_distribution(t: Tensors) -> Any:
    return torch.distributions.Normal(t[0], 1.0).sample()


def cholesky(t: Tensors) -> Any:
    return torch.linalg.cholesky(t[0] @ t[0].t() + 9 * torch.eye(4, device=t[0].device))


def solve(t: Tensors) -> Any:
    return torch.linalg.solve(t[0] @ t[0].t() + 9 * torch.eye(4, device=t[0].device), t[0])


def determinant(t: Tensors) -> Any:
    return torch.linalg.det(t[0] @ t[0].t())


def singular_values(t: Tensors) -> Any:
    return torch.linalg.svdvals(t[0])


def qr(t: Tensors) -> Any:
    return torch.linalg.qr(t[0])


def clip_gradient(t: Tensors) -> Any:
    weight = t[0].clone()
    weight.grad = t[1].clone()
    return torch.nn.utils.clip_grad_norm_([weight], 1.0), weight.grad


def ctc(t: Tensors) -> Any:
    logits = t[0].view(4, 1, 8).log_softmax(-1)
    lengths = torch.full((1,), 4, device=logits.device)
    target = torch.ones(1, 2, dtype=torch.int64, device=logits.device)
    return F.ctc_loss(logits, target, lengths, lengths // 2)


def assert_async(t: Tensors) -> Any:
    torch._assert_async((t[0] == t[0]).all())
    return t[0] + 1


def trapezoid(t: Tensors) -> Any:
    return (
        torch.trapezoid(t[0]),
        torch.cumulative_trapezoid(t[0]),
        torch.cross(t[0][:3], t[1][:3], dim=0),
    )


def cdist(t: Tensors) -> Any:
    return torch.cdist(t[0], t[1]), F.cosine_similarity(t[0], t[1]), F.normalize(t[0])


def nan_to_num(t: Tensors) -> Any:
    return (t[0] / 0).nan_to_num(), t[0].isnan().any(), t[0].isfinite().all()


def lstm_cell(t: Tensors) -> Any:
    x, w, u, b = t
    state = (torch.zeros_like(x[:, :4]), torch.ones_like(x[:, :4]))
    return torch.lstm_cell(x, state, w, u, b, b)


def checked_embedding(t: Tensors) -> Any:
    return F.embedding(t[0], t[1], max_norm=1.0)


HEADS = floats((2, 2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8))
SORTED = constant(torch.linspace(-1, 1, 5))
MEAN_VARIANCE = constant(torch.zeros(8), torch.ones(8))

PROGRAMS: tuple[Program, ...] = (
    Program("custom_mutates", custom_mutates, X),
    Program("custom_writes_input", custom_writes_input, XY),
    Program("custom_unsaid", custom_unsaid, X),
    Program("custom_aliases", custom_aliases, X),
    Program("custom_pair", lambda t: softplus_pair(t[0]), X),
    Program("counter", counter, X),
    Program("chain_in_place", chain_in_place, XY),
    Program("out_variant", out_variant, XY),
    Program("out_resized", out_resized, XY),
    Program("out_slice", out_slice, X),
    Program("transposed_in_place", transposed_in_place, X),
    Program("squeezed_in_place", squeezed_in_place, X),
    Program("resized", resized, X),
    Program("set_to", set_to, X),
    Program("strided_again", strided_again, X),
    Program("metadata_after_use", metadata_after_use, X),
    Program("slices", slices, XY),
    Program("list_of_views", list_of_views, XY),
    Program("reshaped", reshaped, X),
    Program("reshaped_view_written", reshaped_view_written, X),
    Program("expanded", expanded, XY),
    Program("contiguous", contiguous, X),
    Program("moved", moved, X),
    Program("complex_numbers", complex_numbers, XY),
    Program("negative_view", negative_view, XY),
    Program("dtypes", dtypes, XY),
    Program("promotion", promotion, both(X, ints((4, 8)))),
    Program("factories", factories, X),
    Program("scalar_constant", scalar_constant, X),
    Program("where_scalar", where_scalar, XY),
    Program("masked_assign", masked_assign, X),
    Program("foreach", foreach, floats((4, 8), (3,), (4, 8))),
    Program("foreach_norm", foreach_norm, floats((4, 8), (3,))),
    Program("linear", linear, floats((4, 8), (6, 8), (6,))),
    Program("mlp", mlp, floats((4, 8), (8, 8))),
    Program("layer_norm", layer_norm, floats((4, 8), (2, 8))),
    Program("rms_norm", rms_norm, X),
    Program("batch_norm", batch_norm, both(X, MEAN_VARIANCE)),
    Program("instance_norm", instance_norm, both(floats((2, 8, 4)), MEAN_VARIANCE)),
    Program("softmax", softmax, X),
    Program("attention", attention, HEADS),
    Program("attention_masked", attention_masked, both(HEADS, constant(torch.tensor([2, 4])))),
    Program("attention_by_hand", attention_by_hand, HEADS),
    Program("kv_cache", kv_cache, both(floats((8, 4)), distinct(3, 8), floats((3, 4)))),
    Program("rotary", rotary, both(ints((4,), high=100), X)),
    Program("embedding", embedding, both(ints((4,)), floats((8, 4)))),
    Program("one_hot", one_hot, ints((6,))),
    Program("convolution", convolution, floats((4, 8), (4, 8))),
    Program("losses", losses, both(X, ints((4,)))),
    Program("autocast", autocast, floats((4, 8), (6, 8))),
    Program("inner_modes", inner_modes, floats((4, 8), (6, 8)), modes=("no_grad",)),
    Program("recurrent", recurrent, floats((4, 8), (8, 8))),
    Program("sort", sort, X),
    Program("topk", topk, X),
    Program("cumulative", cumulative, both(X, SORTED)),
    Program("gather", gather, both(X, ints((4, 8), high=4))),
    Program(
        "scatter",
        scatter,
        both(whole((4, 8)), constant(torch.arange(32).view(4, 8) % 4), whole((4, 8))),
    ),
    Program("index_put", index_put, both(whole((8, 4)), distinct(3, 8), whole((3, 4)))),
    Program("integer_index", integer_index, both(floats((8, 8)), ints((5,)))),
    Program("byte_shift", byte_shift, ints((16,), high=60, dtype=torch.uint8)),
    Program("masked_scatter", masked_scatter, XY),
    Program("static_nonzero", static_nonzero, X),
    Program("repeats", repeats, both(X, constant(torch.tensor([1, 2, 0, 3])))),
    Program("bucketize", bucketize, both(X, SORTED)),
    Program("norms", norms, X),
    Program("joined", joined, XY),
    Program("triangle", triangle, X),
    Program("quantile", quantile, X),
    Program("quantile_by_tensor", quantile_by_tensor, XY),
    Program("addmm", addmm, floats((4, 8), (8, 6), (4, 6))),
    Program("empty_batch", empty_batch, X),
    Program("swapped", swapped, XY),
    Program("nothing_new", lambda t: (*nothing_new(t), t[0] + 1), X),
    Program("same_twice", same_twice, X),
    Program("polyak", polyak, XY),
    Program("fft", fft, X),
    Program("histogram", histogram, X),
    Program("mode", mode, ints((4, 8), high=3)),
    Program("assert_async", assert_async, X),
    Program("trapezoid", trapezoid, XY),
    Program("cdist", cdist, XY),
    Program("nan_to_num", nan_to_num, X),
    Program("fill_by_host_scalar", fill_by_host_scalar, X),
    Program("lstm_cell", lstm_cell, floats((4, 8), (16, 8), (16, 4), (16,))),
    Program("rand", rand, X, "random"),
    Program("in_place_random", in_place_random, X, "random"),
    Program("dropout", dropout, X, "random"),
    Program("gumbel", gumbel, X, "random"),
    Program("randint", randint, X, "random"),
    Program("multinomial_replaced", multinomial_replaced, X, "random"),
    Program("sample_distribution", sample_distribution, X, "refused"),
    Program("item", item, X, "refused"),
    Program("branch", branch, X, "refused"),
    Program("as_float", as_float, X, "refused"),
    Program("as_int", as_int, X, "refused"),
    Program("as_index", as_index, both(X, ints((2,), high=4)), "refused"),
    Program("select_by_tensor", select_by_tensor, both(X, ints((2,), high=4)), "refused"),
    Program("tolist", tolist, X, "refused"),
    Program("host", host, X, "refused"),
    Program("numpy", numpy, X, "refused"),
    Program("nonzero", nonzero, X, "refused"),
    Program("nonzero_tuple", nonzero_tuple, X, "refused"),
    Program("where_condition", where_condition, X, "refused"),
    Program("argwhere", argwhere, X, "refused"),
    Program("masked_select", masked_select, X, "refused"),
    Program("mask_index", mask_index, X, "refused"),
    Program("mask_row_index", mask_row_index, X, "refused"),
    Program("mask_assign_tensor", mask_assign_tensor, XY, "refused"),
    Program("mask_put", mask_put, X, "refused"),
    Program("unique", unique, X, "refused"),
    Program("unique_consecutive", unique_consecutive, X, "refused"),
    Program("unique_rows", unique_rows, X, "refused"),
    Program("repeat_by_tensor", repeat_by_tensor, both(X, ints((4,), high=3)), "refused"),
    Program("split_by_tensor", split_by_tensor, both(X, constant(torch.tensor([1, 3]))), "refused"),
    Program("equal", equal, XY, "refused"),
    Program("allclose", allclose, XY, "refused"),
    Program("is_nonzero", is_nonzero, X, "refused"),
    Program("contains", contains, X, "refused"),
    Program("from_list", from_list, X, "refused"),
    Program("from_list_as", from_list_as, X, "refused"),
    Program("new_from_list", new_from_list, X, "refused"),
    Program("list_index", list_index, X, "refused"),
    Program("list_index_assign", list_index_assign, X, "refused"),
    Program("bincount", bincount, ints((8,)), "refused"),
    Program("one_hot_unbounded", one_hot_unbounded, ints((8,)), "refused"),
    Program("cond", cond, X, "refused"),
    Program("inverse", inverse, X, "refused"),
    Program("combinations", combinations, X, "refused"),
    Program("printed", printed, X, "refused"),
    Program("foreign_generator", foreign_generator, X, "refused"),
    Program("fill_by_tensor", fill_by_tensor, X, "refused"),
    Program("full_of_tensor", full_of_tensor, X, "refused"),
    Program("multinomial", multinomial, X, "random"),
    Program("randperm", randperm, X, "random"),
    Program("normal_by_tensors", normal_by_tensors, X, "refused"),
    Program("histogram_unbounded", histogram_unbounded, X, "refused"),
    Program("cholesky", cholesky, X, "refused"),
    Program("solve", solve, X, "refused"),
    Program("determinant", determinant, X),
    Program("singular_values", singular_values, X, "refused"),
    Program("qr", qr, X),
    Program("clip_gradient", clip_gradient, XY),
    Program("ctc", ctc, X, "refused"),
    Program("checked_embedding", checked_embedding, both(ints((4,)), floats((8, 4)))),
)
