"""The seam: micro-batches never change the gradient, every backend agrees, and no gradient is silently wrong."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from forge.config import ModelConfig, TrainConfig
from forge.errors import DataError
from forge.model import build_model, init_params
from forge.model.recompute import apply_activation_checkpointing
from forge.pytree import tree_map, tree_norm
from forge.training.grad import build_value_and_grad, clip_factor
from forge.training.loss import build_loss_fn
from forge.training.state import IGNORE, Batch

MODEL = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=13, max_seq_len=16)
PARAMS = init_params(build_model(MODEL), evolve(MODEL, init_std=0.2), 0)


def _seam(transform="backward", checkpointing=False, loss="fused", **options):
    model = build_model(MODEL)
    if checkpointing:
        apply_activation_checkpointing(model)
    loss_fn = build_loss_fn(TrainConfig(loss=loss), MODEL)
    return build_value_and_grad(model, loss_fn, vocab_size=13, transform=transform, **options)


def _batch(accumulation=1, sequences=4, length=6, seed=0, ignored=0.3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 13, (accumulation, sequences, length), generator=generator)
    labels = torch.randint(0, 13, ids.shape, generator=generator)
    labels[torch.rand(ids.shape, generator=generator) < ignored] = IGNORE
    return Batch(ids, labels)


def _regroup(batch: Batch, accumulation: int) -> Batch:
    return tree_map(lambda x: x.reshape(accumulation, -1, *x.shape[2:]), batch)


def _assert_same(left, right, rtol=1e-4, atol=1e-6):
    torch.testing.assert_close(left[1], right[1], rtol=rtol, atol=atol)
    torch.testing.assert_close(left[0].total, right[0].total, rtol=rtol, atol=1e-5)
    assert left[0].tokens == right[0].tokens


@settings(deadline=None, max_examples=20)
@given(
    accumulation=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
    ignored=st.sampled_from([0.0, 0.5, 0.95]),
    transform=st.sampled_from(["backward", "func"]),
)
def test_accumulation_does_not_change_the_gradient(accumulation, seed, ignored, transform):
    batch = _batch(seed=seed, ignored=ignored)
    seam = _seam(transform)
    _assert_same(seam(PARAMS, {}, _regroup(batch, accumulation)), seam(PARAMS, {}, batch))


def test_means_of_two_over_one_target_and_four_over_three_make_three_and_a_half():
    """Two micro-batches with mean losses 2 and 4: a head over two words gives any loss by its logit difference."""

    class OneLogit(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(2, 1, device="meta"))

        def forward(self, input_ids, doc_ids=None, *, output):
            return output(input_ids.unsqueeze(-1).to(self.weight.dtype) / 1000, self.weight, [])

    def state_for(loss):  # log(1 + e^x) = loss for weight [0, 1] and label 0
        return torch.log(torch.expm1(torch.tensor(loss, dtype=torch.float64))).mul(1000).round().long()

    a, b = state_for(2.0), state_for(4.0)
    batch = Batch(
        torch.stack([a.expand(3), b.expand(3)]).unsqueeze(1),
        torch.tensor([[[0, IGNORE, IGNORE]], [[0, 0, 0]]]),
    )
    loss_fn = build_loss_fn(TrainConfig(), ModelConfig(vocab_size=2))
    seam = build_value_and_grad(OneLogit(), loss_fn, vocab_size=2)
    params = {"weight": torch.tensor([[0.0], [1.0]])}
    sums, grads = seam(params, {}, batch)
    assert float(sums.total / sums.tokens) == pytest.approx(3.5, abs=1e-3)
    _, one_batch = seam(params, {}, Batch(batch.input_ids.reshape(1, 2, 3), batch.labels.reshape(1, 2, 3)))
    torch.testing.assert_close(grads, one_batch)


def test_a_micro_batch_without_targets_adds_nothing():
    batch = _batch(accumulation=3, sequences=2)
    batch.labels[1] = IGNORE
    without = Batch(batch.input_ids[[0, 2]], batch.labels[[0, 2]])
    _assert_same(_seam()(PARAMS, {}, batch), _seam()(PARAMS, {}, without))


def test_all_labels_ignored_gives_zero_loss_and_zero_gradients():
    batch = _batch(ignored=1.0)
    for transform in ("backward", "func"):
        sums, grads = _seam(transform)(PARAMS, {}, batch)
        assert float(sums.total) == 0.0 and int(sums.tokens) == 0
        assert all(not g.any() for g in grads.values())


@pytest.mark.parametrize("loss", ["fused", "chunked", "plain"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_way_to_the_gradient_agrees(loss, checkpointing):
    batch = _batch(accumulation=2)
    expected = _seam("func", loss="plain")(PARAMS, {}, batch)
    _assert_same(_seam("backward", checkpointing, loss)(PARAMS, {}, batch), expected)


@pytest.mark.parametrize("transform", ["backward", "func"])
def test_the_gradient_belongs_to_the_parameters_passed_in(transform):
    batch, seam = _batch(), _seam(transform)
    sums, grads = seam(PARAMS, {}, batch)
    doubled, _ = seam(tree_map(lambda p: 2 * p, PARAMS), {}, batch)
    assert float(tree_norm(grads)) > 0
    assert abs(float(sums.total - doubled.total)) > 1e-3


def test_the_gradient_is_that_of_finite_differences():
    batch, seam = _batch(), _seam()
    _, grads = seam(PARAMS, {}, batch)
    name, step = "blocks.1.mlp.w_up.weight", 1e-2
    direction = torch.randn(PARAMS[name].shape, generator=torch.Generator().manual_seed(0))
    up, down = (seam({**PARAMS, name: PARAMS[name] + s * direction}, {}, batch)[0].total for s in (step, -step))
    slope = (up - down) / (2 * step) / batch.labels.ne(IGNORE).sum()
    assert float((grads[name] * direction).sum()) == pytest.approx(float(slope), rel=2e-2)


@pytest.mark.parametrize("transform", ["backward", "func"])
def test_frozen_parameters_get_no_gradient(transform):
    kept = {"blocks.0.mlp.w_up.weight", "norm.weight"}
    _, grads = _seam(transform, trainable=kept)(PARAMS, {}, _batch())
    everything = _seam(transform)(PARAMS, {}, _batch())
    assert grads.keys() == kept
    torch.testing.assert_close(grads, {name: everything[1][name] for name in kept}, rtol=1e-4, atol=1e-6)


def test_the_arguments_are_left_untouched():
    batch, before = _batch(), tree_map(torch.clone, PARAMS)
    _seam()(PARAMS, {}, batch)
    assert all(torch.equal(before[name], p) and p.grad is None and not p.requires_grad for name, p in PARAMS.items())


def test_bf16_compute_keeps_fp32_gradients_near_the_exact_ones():
    _, exact = _seam()(PARAMS, {}, _batch())
    _, grads = _seam(compute_dtype=torch.bfloat16)(PARAMS, {}, _batch())
    assert all(g.dtype == torch.float32 for g in grads.values())
    difference = tree_norm({name: grads[name] - exact[name] for name in exact}) / tree_norm(exact)
    assert 0 < float(difference) < 0.05


@pytest.mark.parametrize("transform", ["backward", "func"])
def test_bf16_parameters_add_up_micro_batches_in_fp32(transform):
    params = {name: p.bfloat16() for name, p in PARAMS.items()}
    seam = _seam(transform, compute_dtype=torch.bfloat16)
    one = _batch(1, 1)
    many = tree_map(lambda x: x.expand(512, -1, -1), one)  # a sum in bf16 would stand still at 256 of them
    _, single = seam(params, {}, one)
    _, summed = seam(params, {}, many)
    assert all(grad.dtype == torch.bfloat16 for grad in summed.values())
    difference = tree_norm({name: summed[name].float() - single[name].float() for name in single}) / tree_norm(single)
    assert float(difference) < 0.01


class _Replayed(nn.Linear):
    """As in a CUDA graph: reads the weight where it once lay, and writes its gradient over that of the last time."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.seen: list[int] = []
        self.gradient: torch.Tensor | None = None

    def forward(self, x):
        self.seen.append(self.weight.data_ptr())
        if self.gradient is not None:
            self.gradient.fill_(float("nan"))
        return F.linear(x, _InOnePlace.apply(self.weight, self))


class _InOnePlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, module):
        ctx.module = module
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        module = ctx.module
        module.gradient = gradient.clone() if module.gradient is None else module.gradient.copy_(gradient)
        return module.gradient.detach(), None


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_block_that_is_replayed_from_fixed_memory_gets_the_same_gradient(stored, dtype, accumulation):
    params = {name: p.to(stored) for name, p in PARAMS.items()}
    model, batch = build_model(MODEL), _regroup(_batch(), accumulation)
    replayed = model.blocks["0"].mlp.w_up = _Replayed(model.blocks["0"].mlp.w_up)
    loss_fn, options = build_loss_fn(TrainConfig(), MODEL), {"vocab_size": 13, "compute_dtype": dtype}
    seam = build_value_and_grad(model, loss_fn, **options, cuda_graphs=True)
    plain = build_value_and_grad(build_model(MODEL), loss_fn, **options)
    for _ in range(2):
        sums, found = seam(params, {}, batch)
        expected_sums, expected = plain(params, {}, batch)
        assert torch.equal(sums.total, expected_sums.total)
        for name, grad in expected.items():
            assert found[name].dtype == grad.dtype
            assert torch.equal(found[name], grad), name
    assert len(replayed.seen) == 2 * accumulation and len(set(replayed.seen)) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_bf16_compute_on_the_cpu_sums_over_many_tokens_in_fp32(tied):
    options = {"tied_embeddings": tied, "position": "learned", "norm": "layernorm", "bias": True}
    config = evolve(MODEL, **options)
    model, params = build_model(config), init_params(build_model(config), config, 0)
    params = {name: p + (0.1 if "norm" in name else 0) for name, p in params.items()}

    def gradient(dtype):
        seam = build_value_and_grad(model, build_loss_fn(TrainConfig(), config), vocab_size=13, compute_dtype=dtype)
        return seam(params, {}, _batch(1, 1024, 8))[1]

    exact, found = gradient(torch.float32), gradient(torch.bfloat16)
    for name in ("embed.weight", "position_embed.weight", "norm.weight", "norm.bias", "blocks.0.attn_norm.bias"):
        assert float((found[name] - exact[name]).norm() / exact[name].norm()) < 0.05, name


@pytest.mark.parametrize("transform", ["backward", "func"])
def test_a_label_outside_the_vocabulary_is_refused(transform):
    batch = _batch()
    batch.labels[0, 1, 2] = 13
    with pytest.raises(DataError, match=r"label 13 at position \(0, 1, 2\)"):
        _seam(transform)(PARAMS, {}, batch)


@settings(deadline=None, max_examples=30)
@given(norm=st.floats(0, 1e6), limit=st.floats(1e-3, 1e3))
def test_clipping_never_lengthens_and_never_exceeds_the_limit(norm, limit):
    factor = float(clip_factor(torch.tensor(norm), limit))
    assert 0 < factor <= 1 and norm * factor <= limit * (1 + 1e-5)


def test_the_loss_of_the_mapped_seam_has_the_derivative_that_the_gradient_says():
    model = build_model(evolve(MODEL, attention_backend="math"))
    loss_fn = build_loss_fn(TrainConfig(loss="plain"), MODEL)
    batch, seam = _batch(), build_value_and_grad(model, loss_fn, vocab_size=13, transform="func")
    direction = tree_map(lambda p: torch.randn(p.shape, generator=torch.Generator().manual_seed(0)), PARAMS)
    _, grads = seam(PARAMS, {}, batch)
    expected = sum((grads[name] * direction[name]).sum() for name in PARAMS) * batch.labels.ne(IGNORE).sum()

    def total_of(params):
        return seam(params, {}, batch)[0].total

    _, slope = torch.func.jvp(total_of, (PARAMS,), (direction,))
    by_reverse = torch.func.grad(total_of)(PARAMS)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        sum((by_reverse[n] * direction[n]).sum() for n in PARAMS), expected, rtol=1e-4, atol=1e-5
    )
