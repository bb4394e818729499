"""The loss under a head cut over two ranks is the plain loss under the whole head, in value and gradient."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from forge.model.head import head_logits
from forge.training.fused_loss import LossOptions, token_losses
from forge.training.state import IGNORE
from forge.training.vocab_loss import vocab_parallel_losses
from tests.distributed.ranks import run_ranks
from tests.made import Made

DIM = 8
OPTIONS = {
    "plain": LossOptions(),
    "z-loss": LossOptions(z_loss_weight=0.3),
    "smoothed": LossOptions(label_smoothing=0.1),
    "capped": LossOptions(logit_softcap=2.0),
    "all at once": LossOptions(z_loss_weight=0.3, label_smoothing=0.1, logit_softcap=2.0),
}
SHAPES = [(1, 4, 12), (7, 3, 12), (9, 16, 11), (13, 4, 2)]  # tokens, chunk, vocabulary: even and not
CASES = list(product(OPTIONS, SHAPES, (torch.float32, torch.bfloat16)))


def _inputs(tokens, vocab, dtype, ignored=0.3):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, DIM, generator=generator).to(dtype)
    weight = torch.randn(vocab, DIM, generator=generator).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORE
    return hidden, weight, labels


def _on_rank(hidden, weight, labels, options, chunk):
    """Losses and gradients, those of the hidden states summed over the ranks and those of this rank's rows."""
    parts = weight.tensor_split(dist.get_world_size())
    start = sum(len(part) for part in parts[: dist.get_rank()])
    rows = parts[dist.get_rank()].clone().requires_grad_()
    hidden = hidden.clone().requires_grad_()
    found = vocab_parallel_losses(hidden, rows, labels, options, chunk, dist.group.WORLD, start)
    of_hidden, of_rows = torch.autograd.grad(2 * found.total, (hidden, rows))
    dtypes = of_hidden.dtype, of_rows.dtype
    of_hidden = of_hidden.float()
    dist.all_reduce(of_hidden)
    return found.total.detach(), found.ce, found.squared_lse, of_hidden, of_rows.float(), dtypes


def _special_cases():
    found = {}
    hidden, weight, labels = _inputs(6, 12, torch.float32)
    found["ignored"] = _on_rank(hidden, weight, torch.full_like(labels, IGNORE), LossOptions(z_loss_weight=1.0), 4)
    huge = torch.tensor([[3e4, 0.0]])
    found["huge"] = _on_rank(huge, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([1]), LossOptions(), 4)
    hidden, weight, labels = _inputs(64, 600, torch.float32)
    with Made() as made:
        _on_rank(hidden, weight, labels, LossOptions(), 4)
    found["largest"] = max(made.sizes)
    rows = weight.chunk(2)[dist.get_rank()].requires_grad_()
    total = vocab_parallel_losses(hidden, rows, labels, LossOptions(), 4, dist.group.WORLD, 300 * dist.get_rank()).total
    found["frozen hidden"] = torch.autograd.grad(total, rows)[0]
    return found


def _all_cases():
    found = {}
    for name, shape, dtype in CASES:
        tokens, chunk, vocab = shape
        found[name, shape, dtype] = _on_rank(*_inputs(tokens, vocab, dtype), OPTIONS[name], chunk)
    return found, _special_cases()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(_all_cases, 2)


def _expected(hidden, weight, labels, options):
    """Of the same values in fp32, by autograd through whole logits."""
    hidden, weight = (x.float().requires_grad_() for x in (hidden, weight))
    found = token_losses(head_logits(hidden, weight, options.logit_softcap), labels, options)
    return found.total.detach(), found.ce, found.squared_lse, *torch.autograd.grad(2 * found.total, (hidden, weight))


@pytest.mark.parametrize(("name", "shape", "dtype"), CASES)
def test_a_cut_head_gives_the_losses_and_gradients_of_the_whole(name, shape, dtype, ranks):
    tokens, _, vocab = shape
    total, ce, squared_lse, of_hidden, of_weight = _expected(*_inputs(tokens, vocab, dtype), OPTIONS[name])
    exact = {"rtol": 1e-4, "atol": 1e-5}
    rounded = exact if dtype == torch.float32 else {"rtol": 2e-2, "atol": 6e-2}
    for rank, (found, _) in enumerate(ranks):
        values = found[name, shape, dtype]
        torch.testing.assert_close(values[:3], (total, ce, squared_lse), **exact)
        torch.testing.assert_close(values[3], of_hidden, **rounded)
        torch.testing.assert_close(values[4], of_weight.tensor_split(2)[rank], **rounded)
        assert values[5] == (dtype, dtype)
        assert all(torch.equal(a, b) for a, b in zip(values[:3], ranks[0][0][name, shape, dtype][:3], strict=True))


def test_all_labels_ignored_gives_zero_and_zero_gradients_under_a_cut_head(ranks):
    for _, found in ranks:
        total, ce, squared_lse, of_hidden, of_rows, _ = found["ignored"]
        assert float(total) == 0.0
        assert not any(x.any() for x in (ce, squared_lse, of_hidden, of_rows))


def test_logits_of_thirty_thousand_on_another_rank_do_not_overflow(ranks):
    for _, found in ranks:
        total, _, _, of_hidden, of_rows, _ = found["huge"]
        assert float(total) == 6e4
        assert torch.isfinite(of_hidden).all() and torch.isfinite(of_rows).all()


def test_no_rank_makes_more_logits_than_a_chunk_of_its_own_columns(ranks):
    for _, found in ranks:
        assert found["largest"] == 300 * DIM  # this rank's rows; a chunk of logits is 4 x 300, all of them 64 x 600


def test_a_head_learns_while_what_is_below_it_is_frozen(ranks):
    hidden, weight, labels = _inputs(64, 600, torch.float32)
    expected = _expected(hidden, weight, labels, LossOptions())[4] / 2
    for rank, (_, found) in enumerate(ranks):
        torch.testing.assert_close(found["frozen hidden"], expected.chunk(2)[rank], rtol=1e-4, atol=1e-5)
