"""The loss: values worked out by hand, equality of the three implementations, and torch's own as a reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from forge.config import ModelConfig, TrainConfig
from forge.errors import DataError, ForgeError
from forge.training import fused_loss
from forge.training.fused_loss import LossOptions, fused_losses, token_losses
from forge.training.loss import build_eval_loss_fn, build_loss_fn, check_labels, cross_entropy
from forge.training.state import IGNORE
from tests.devices import DEVICES
from tests.made import Made

MODEL = ModelConfig(dim=8, n_layers=1, vocab_size=11, max_seq_len=64)


@pytest.fixture(params=[0, fused_loss.FEW_LOGITS], ids=["in chunks", "at once"])
def few(request, monkeypatch):
    """Logits up to which the fused loss makes them at once."""
    monkeypatch.setattr(fused_loss, "FEW_LOGITS", request.param)


def _inputs(tokens: int, seed: int = 0, dim: int = 8, vocab: int = 11, ignored: float = 0.3):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, tokens, dim, generator=generator)
    weight = torch.randn(vocab, dim, generator=generator)
    labels = torch.randint(0, vocab, (1, tokens), generator=generator)
    labels[torch.rand(1, tokens, generator=generator) < ignored] = IGNORE
    return hidden, weight, labels


def _value_and_gradient(kind: str, hidden, weight, labels, **options):
    loss_fn = build_loss_fn(TrainConfig(loss=kind, **options), MODEL)
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    sums = loss_fn(hidden, weight, labels, None)
    return sums, *torch.autograd.grad(sums.total, (hidden, weight))


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 13),
    chunk=st.integers(1, 8),
    seed=st.integers(0, 100),
    z=st.sampled_from([0.0, 0.3]),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_fused_chunked_and_plain_agree_for_any_number_of_tokens(tokens, chunk, seed, z, smoothing):
    options = {"loss_chunk_size": chunk, "z_loss_weight": z, "label_smoothing": smoothing}
    inputs = _inputs(tokens, seed)
    sums, grad_hidden, grad_weight = _value_and_gradient("plain", *inputs, **options)
    for kind in ("fused", "chunked"):
        other, other_hidden, other_weight = _value_and_gradient(kind, *inputs, **options)
        torch.testing.assert_close(other.total, sums.total, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close((other.ce, other.z), (sums.ce, sums.z), rtol=1e-5, atol=1e-5)
        assert other.tokens == sums.tokens
        torch.testing.assert_close(other_hidden, grad_hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other_weight, grad_weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["fused", "chunked", "plain"])
def test_bf16_inputs_keep_an_fp32_loss_and_gradients_of_their_own_dtype(kind, device):
    hidden, weight, labels = (tensor.to(device) for tensor in _inputs(9, 1))
    low = hidden.bfloat16(), weight.bfloat16(), labels
    sums, grad_hidden, grad_weight = _value_and_gradient(kind, *low, loss_chunk_size=4)
    exact, exact_hidden, exact_weight = _value_and_gradient(
        "plain", hidden.bfloat16().float(), weight.bfloat16().float(), labels
    )
    assert sums.total.dtype == torch.float32
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16
    torch.testing.assert_close(sums.total, exact.total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_hidden.float(), exact_hidden, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(grad_weight.float(), exact_weight, rtol=2e-2, atol=4e-2)


def test_the_factor_of_a_bf16_gradient_is_not_rounded():
    hidden, weight, labels = (tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in _inputs(300, 1))
    hidden.requires_grad_()
    loss = build_loss_fn(TrainConfig(), MODEL)(hidden, weight, labels, None).total
    (whole,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (part,) = torch.autograd.grad(loss / 683, hidden)  # 1 / 683 in bf16 is 0.2 % too large
    assert abs(float(part.double().norm() * 683 / whole.double().norm()) - 1) < 5e-4


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_bf16_loss_over_50k_words_is_within_two_thousandths_of_float64(kind):
    hidden, weight, labels = _inputs(4, 2, dim=64, vocab=50_000)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    sums = build_loss_fn(TrainConfig(loss=kind), MODEL)(hidden, weight, labels, None)
    exact = F.cross_entropy((hidden.double() @ weight.double().T)[0], labels[0], ignore_index=IGNORE, reduction="sum")
    assert abs(float(sums.total) / float(exact) - 1) < 2e-3


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["fused", "chunked", "plain"])
def test_logits_of_thirty_thousand_do_not_overflow(kind):
    hidden = torch.tensor([[[3e4, 0.0]]]).requires_grad_()
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    sums = build_loss_fn(TrainConfig(loss=kind), MODEL)(hidden, weight, torch.tensor([[1]]), None)
    assert float(sums.total.detach()) == 6e4
    sums.total.backward()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["fused", "chunked", "plain"])
def test_all_labels_ignored_gives_zero_and_zero_gradients(kind):
    hidden, weight, labels = _inputs(5)
    sums, grad_hidden, grad_weight = _value_and_gradient(kind, hidden, weight, torch.full_like(labels, IGNORE))
    assert float(sums.total.detach()) == 0.0 and int(sums.tokens) == 0
    assert not grad_hidden.any() and not grad_weight.any()


def test_z_loss_counts_target_tokens_only():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]])
    found = token_losses(logits, torch.tensor([2, IGNORE]), LossOptions(z_loss_weight=1.0))
    assert float(found.squared_lse.sum()) == pytest.approx(math.log(4) ** 2, abs=1e-6)
    assert float(found.squared_lse.sum()) == pytest.approx(1.921812, abs=1e-6)


@settings(deadline=None, max_examples=20)
@given(tokens=st.integers(1, 20), seed=st.integers(0, 50), smoothing=st.sampled_from([0.0, 0.1]))
def test_cross_entropy_is_torchs_with_label_smoothing_and_ignored_labels(tokens, seed, smoothing):
    hidden, weight, labels = _inputs(tokens, seed)
    labels[0, 0] = 1  # torch gives NaN without any target
    logits = hidden @ weight.T
    ours = cross_entropy(logits, labels, label_smoothing=smoothing)
    theirs = F.cross_entropy(logits[0], labels[0], ignore_index=IGNORE, label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("few")
def test_the_evaluation_loss_has_no_z_loss_and_no_smoothing():
    hidden, weight, labels = _inputs(7)
    sums = build_eval_loss_fn(TrainConfig(z_loss_weight=1.0, label_smoothing=0.5), MODEL)(hidden, weight, labels, None)
    exact = F.cross_entropy((hidden @ weight.T)[0], labels[0], ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(sums.total, exact)


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_soft_capped_logits_match_autograd(kind):
    model = ModelConfig(dim=8, n_layers=1, vocab_size=11, max_seq_len=64, logit_softcap=2.0)
    hidden, weight, labels = _inputs(6, 3)
    hidden.requires_grad_()
    sums = build_loss_fn(TrainConfig(loss=kind), model)(hidden, weight, labels, None)
    capped = 2.0 * torch.tanh(hidden @ weight.T / 2.0)
    exact = F.cross_entropy(capped[0], labels[0], ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(sums.total, exact)
    torch.testing.assert_close(
        torch.autograd.grad(sums.total, hidden)[0], torch.autograd.grad(exact, hidden)[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.usefixtures("few")
def test_sources_split_the_sums_exactly():
    hidden, weight, labels = (torch.cat([x, y]) if x.dim() == 3 or x.dtype == torch.int64 else x
                              for x, y in zip(_inputs(5, 1), _inputs(5, 2), strict=True))  # fmt: skip
    loss_fn = build_loss_fn(TrainConfig(), MODEL, sources=3)
    sums = loss_fn(hidden, weight, labels, torch.tensor([2, 0]))
    torch.testing.assert_close(sums.source_ce.sum(), sums.ce)
    assert sums.source_tokens.tolist() == [int((labels[1] >= 0).sum()), 0, int((labels[0] >= 0).sum())]


def test_a_label_outside_the_vocabulary_is_named():
    labels = torch.tensor([[[3, 11], [IGNORE, 0]]])
    with pytest.raises(DataError, match=r"label 11 at position \(0, 0, 1\) .* vocabulary of 11"):
        check_labels(labels, 11)
    with pytest.raises(DataError, match="label -5"):
        check_labels(torch.tensor([-5]), 11)


def test_fused_loss_works_under_torch_func_grad_and_vmap():
    hidden, weight, labels = _inputs(6, 4, ignored=0.0)
    hidden, labels = hidden[0], labels[0]
    options = LossOptions(z_loss_weight=0.1)

    def fused(h, w, y):
        return fused_losses(h[None], w, y[None], options, chunk=2).total

    def plain(h, w, y):
        return token_losses(h[None] @ w.T, y[None], options).total

    for argnums in (0, 1):
        ours = torch.func.vmap(torch.func.grad(fused, argnums), (0, None, 0))(hidden, weight, labels)
        theirs = torch.func.vmap(torch.func.grad(plain, argnums), (0, None, 0))(hidden, weight, labels)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_few_logits_made_at_once_can_be_differentiated_again():
    hidden, weight, labels = _inputs(6, 4)

    def curvature(losses):
        h = hidden[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(losses(h), h, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), h)[0]

    found = curvature(lambda h: fused_losses(h, weight, labels[0], LossOptions(), chunk=6).total)
    exact = curvature(lambda h: F.cross_entropy(h @ weight.T, labels[0], ignore_index=IGNORE, reduction="sum"))
    torch.testing.assert_close(found, exact)


def test_a_second_derivative_of_the_fused_loss_is_refused_with_the_remedy():
    hidden, weight, labels = _inputs(3, ignored=0.0)

    def loss(h):
        return fused_losses(h, weight, labels[0], LossOptions(), chunk=2).total

    with pytest.raises(ForgeError, match=r"--train\.loss plain"):
        torch.func.grad(lambda h: torch.func.grad(loss)(h).square().sum())(hidden[0])


def test_the_fused_backward_pass_makes_the_gradients_and_nothing_else_of_their_size():
    hidden, weight, labels = _inputs(5, ignored=0.0)
    h, w = hidden[0].clone().requires_grad_(), weight.clone().requires_grad_()
    total = fused_losses(h, w, labels[0], LossOptions(), chunk=2).total
    with Made() as made:
        torch.autograd.grad(total, (h, w))
    assert sorted(size for size in made.sizes if size > 1) == sorted([h.numel(), w.numel()])


def test_fused_loss_compiles_without_a_graph_break():
    hidden, weight, labels = _inputs(5, ignored=0.0)
    options = LossOptions()

    def loss(h, w):
        return fused_losses(h, w, labels[0], options, chunk=2).total

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    h, w = hidden[0].clone().requires_grad_(), weight.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(compiled(h, w), (h, w)), torch.autograd.grad(loss(h, w), (h, w)))
