"""forge and its peers behind one interface: `step()` takes one update and returns its loss, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count, cycle
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from benchmarks.regimes import Device, Precision, Regime, job_config
from forge.checkpoint.huggingface.config_json import write_config_json
from forge.checkpoint.huggingface.families import family_of
from forge.checkpoint.huggingface.tensors import origins, to_family
from forge.config import AdamW, JobConfig, ModelConfig, Muon
from forge.data.batch import IGNORE, Batch
from forge.distributed.parallelize import materialize, parallelize
from forge.errors import RunError
from forge.model import build_model, init_params
from forge.training.loss import build_loss_fn, count_targets
from forge.training.optimizer import decays, parameter_roles
from forge.training.parts import build_parts, initial_state, step_for
from forge.training.runtime import build_runtime

BATCHES = 4
"""Different batches, taken in turn."""

Build = Callable[[Regime, Device, Precision, "Mapping[str, Tensor] | None"], "Runner"]


@frozen
class Runner:
    """One side of the comparison."""

    name: str
    step: Callable[[], Tensor]  # one update; the loss of its batch before it, fp32 ()
    steps: Callable[[int], Tensor] | None = None  # several; without it `step` is called for each


def initial_weights(regime: Regime) -> dict[str, Tensor]:
    """The weights that both sides start from, by forge's names."""
    config = job_config(regime, "cpu", "fp32")
    return init_params(build_model(config.model), config.model, config.train.seed)


def batches(regime: Regime, device: Device) -> Iterator[Batch]:
    """The same few batches over and over: random tokens, each the target of the one before it."""
    return batches_for(job_config(regime, device, "fp32"), device)


def batches_for(config: JobConfig, device: Device) -> Iterator[Batch]:
    """`batches` in the shape that a job takes."""
    generator, train, micros = torch.Generator().manual_seed(0), config.train, config.accumulation_steps()

    def make() -> Batch:
        shape = (micros, train.global_batch_size // micros, train.seq_len)
        tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
        labels = torch.cat((tokens[..., 1:], torch.full_like(tokens[..., :1], IGNORE)), dim=-1)
        return Batch(tokens, labels).to(device)

    return cycle([make() for _ in range(BATCHES)])


def forge_runner(
    regime: Regime, device: Device, precision: Precision, weights: Mapping[str, Tensor] | None = None
) -> Runner:
    """forge's donating step, as the training loop takes it. Its weights follow from the seed: `weights` is not read."""
    return Runner("forge", forge_step(job_config(regime, device, precision), batches(regime, device)))


def forge_step(config: JobConfig, data: Iterator[Batch]) -> Callable[[], Tensor]:
    """`forge_runner`'s step of any job."""
    parts = build_parts(config, build_runtime(config))
    state, step_at = initial_state(config, parts), step_for(config, parts)
    updates = count()

    def step() -> Tensor:
        nonlocal state
        train_step, ready = step_at(next(updates), state)
        state, result = train_step(ready, next(data))
        return result.loss

    return step


def handwritten_runner(
    regime: Regime, device: Device, precision: Precision, weights: Mapping[str, Tensor] | None = None
) -> Runner:
    """The floor of overhead: forge's model and loss in the plainest loop, with torch's own optimizer and clipping."""
    config = job_config(regime, device, precision)
    return Runner("hand-written", handwritten_step(config, batches(regime, device), device, precision))


def handwritten_step(
    config: JobConfig, data: Iterator[Batch], device: Device, precision: Precision
) -> Callable[[], Tensor]:
    """`handwritten_runner`'s step of any job without accumulation."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    stored = torch.bfloat16 if config.train.param_dtype == "bf16" else torch.float32
    model = build_model(config.model)
    parallelize(model, config, None, compute_dtype=dtype, param_dtype=stored)
    materialize(model, config, torch.device(device))
    model.to(stored)
    loss_fn = build_loss_fn(config.train, config.model)

    def loss_of(batch: Batch) -> Tensor:
        labels = batch.labels[0]

        def mean_loss(hidden: Tensor, weight: Tensor, _: list[Any]) -> Tensor:
            with torch.autocast(device, enabled=False):  # the loss mixes dtypes on purpose
                return loss_fn(hidden.to(dtype), weight.to(dtype), labels, None).total / count_targets(labels)

        with autocast(device, precision):
            loss: Tensor = model(batch.input_ids[0], output=mean_loss)
        return loss

    return plain_step(dict(model.named_parameters()), config, loss_of, data)


def transformers_runner(
    regime: Regime, device: Device, precision: Precision, weights: Mapping[str, Tensor] | None = None
) -> Runner:
    """transformers' Llama, or Mixtral where there are experts, in a plain PyTorch training loop.

    Args:
        weights: by forge's names, copied in; None = transformers' own initialisation.

    Raises:
        RunError: transformers is not installed.
    """
    config = job_config(regime, device, precision)
    model = build_transformers(config.model, weights).to(device).train()
    return Runner("transformers", transformers_step(model, config, batches(regime, device), device, precision))


def transformers_step(
    model: Any, config: JobConfig, data: Iterator[Batch], device: Device, precision: Precision
) -> Callable[[], Tensor]:
    """`transformers_runner`'s step of any model of transformers."""

    def loss_of(batch: Batch) -> Tensor:
        ids = batch.input_ids[0]
        with autocast(device, precision):
            loss: Tensor = model(input_ids=ids, labels=ids).loss  # the model shifts the labels itself
        return loss

    return plain_step(dict(model.named_parameters()), config, loss_of, data)


def plain_step(
    params: Mapping[str, nn.Parameter],
    config: JobConfig,
    loss_of: Callable[[Batch], Tensor],
    data: Iterator[Batch],
    clip: Callable[[Iterable[Tensor], float], Tensor] = torch.nn.utils.clip_grad_norm_,
) -> Callable[[], Tensor]:
    """What one writes by hand: loss, backward, `clip_grad_norm_`, the optimizer, `zero_grad`."""
    optimizers, max_norm = plain_optimizers(params, config), config.train.grad_clip_norm
    assert max_norm is not None

    def step() -> Tensor:
        loss = loss_of(next(data))
        loss.backward()
        clip(params.values(), max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def build_transformers(model: ModelConfig, weights: Mapping[str, Tensor] | None = None) -> Any:
    """The model of transformers that forge would export to, on the CPU in fp32, with forge's weights if given.

    Raises:
        RunError: transformers is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise RunError("the peer is transformers, which is not installed: pip install -e '.[bench]'") from None
    described = write_config_json(model, family_of(model), dtype="float32")
    config = AutoConfig.for_model(**described | {"use_cache": False, "bos_token_id": None, "eos_token_id": None})
    peer = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    if weights is not None:
        peer.load_state_dict(transformers_weights(model, weights), strict=True)
    return peer


def transformers_weights(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """forge's weights by the names of the modules of transformers, which stacks the experts of a layer again."""
    found = published_weights(model, {name: weight for name, weight in weights.items() if ".mlp.experts." not in name})
    found = {name.replace(".block_sparse_moe.", ".mlp."): weight for name, weight in found.items()}
    for layer in range(model.n_layers if model.moe.n_experts else 0):
        ours, theirs = f"blocks.{layer}.mlp.experts", f"model.layers.{layer}.mlp.experts"
        gate, up, down = (weights[f"{ours}.{part}"].mT for part in ("w_gate", "w_up", "w_down"))
        found |= {f"{theirs}.gate_up_proj": torch.cat((gate, up), dim=1), f"{theirs}.down_proj": down}
    return found


def published_weights(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """forge's weights by the names of the family's files, from which the libraries convert."""
    return to_family(origins(family_of(model), weights), weights)


def plain_optimizers(params: Mapping[str, nn.Parameter], config: JobConfig) -> list[torch.optim.Optimizer]:
    """torch's own optimizers with forge's numbers: fused AdamW, or Muon on hidden matrices and AdamW on the rest."""
    chosen = config.optimizer
    if isinstance(chosen, AdamW):
        return [_fused_adamw(params, chosen)]
    assert isinstance(chosen, Muon)
    roles = parameter_roles(params)
    hidden = [p for name, p in params.items() if roles[name] == "hidden"]
    muon = torch.optim.Muon(
        hidden,
        lr=chosen.lr,
        weight_decay=chosen.weight_decay,
        momentum=chosen.momentum,
        nesterov=chosen.nesterov,
        ns_steps=chosen.ns_steps,
        adjust_lr_fn="original" if chosen.scaling == "spectral" else "match_rms_adamw",
    )
    rest = {name: p for name, p in params.items() if roles[name] != "hidden"}
    adam = AdamW(
        lr=chosen.adam_lr,
        beta1=chosen.adam_beta1,
        beta2=chosen.adam_beta2,
        eps=chosen.adam_eps,
        weight_decay=chosen.weight_decay,
    )
    return [muon, _fused_adamw(rest, adam)]


def plain_adamw(model: nn.Module, config: JobConfig) -> torch.optim.AdamW:
    """Fused AdamW with forge's numbers and forge's two groups: matrices decay, norms and embedding do not."""
    assert isinstance(config.optimizer, AdamW)
    return _fused_adamw(dict(model.named_parameters()), config.optimizer)


def _fused_adamw(params: Mapping[str, nn.Parameter], chosen: AdamW) -> torch.optim.AdamW:
    roles = parameter_roles(params)
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in params.items() if decays(roles[name]) is decayed], "weight_decay": decay}
        for decayed, decay in ((True, chosen.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=chosen.lr, betas=(chosen.beta1, chosen.beta2), eps=chosen.eps, fused=True)


def autocast(device: Device, precision: Precision) -> AbstractContextManager[Any]:
    """Where a side other than forge computes its loss."""
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
