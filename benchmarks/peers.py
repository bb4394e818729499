"""Both sides behind one interface: `step()` takes one update and returns its loss, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count, cycle
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from benchmarks.regimes import Device, Precision, Regime, job_config
from forge.config import AdamW, JobConfig, ModelConfig
from forge.data.batch import IGNORE, Batch
from forge.errors import RunError
from forge.model import build_model, init_params
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


def initial_weights(regime: Regime) -> dict[str, Tensor]:
    """The weights that both sides start from, by forge's names."""
    config = job_config(regime, "cpu", "fp32")
    return init_params(build_model(config.model), config.model, config.train.seed)


def batches(regime: Regime, device: Device) -> Iterator[Batch]:
    """The same few batches over and over: random tokens, each the target of the one before it."""
    generator = torch.Generator().manual_seed(0)

    def make() -> Batch:
        shape = (1, regime.batch, regime.seq_len)
        tokens = torch.randint(regime.vocab_size, shape, generator=generator)
        labels = torch.cat((tokens[..., 1:], torch.full_like(tokens[..., :1], IGNORE)), dim=-1)
        return Batch(tokens, labels).to(device)

    return cycle([make() for _ in range(BATCHES)])


def forge_runner(
    regime: Regime, device: Device, precision: Precision, weights: Mapping[str, Tensor] | None = None
) -> Runner:
    """forge's donating step, as the training loop takes it. Its weights follow from the seed: `weights` is not read."""
    config = job_config(regime, device, precision)
    parts = build_parts(config, build_runtime(config))
    state, step_at = initial_state(config, parts), step_for(config, parts)
    data, updates = batches(regime, device), count()

    def step() -> Tensor:
        nonlocal state
        train_step, ready = step_at(next(updates), state)
        state, result = train_step(ready, next(data))
        return result.loss

    return Runner("forge", step)


def peer_runner(
    regime: Regime, device: Device, precision: Precision, weights: Mapping[str, Tensor] | None = None
) -> Runner:
    """transformers' Llama in a plain PyTorch training loop.

    Args:
        weights: by forge's names, copied in; None = transformers' own initialisation.

    Raises:
        RunError: transformers is not installed.
    """
    config = job_config(regime, device, precision)
    model = build_llama(config.model)
    if weights is not None:
        model.load_state_dict(llama_weights(weights))
    model = model.to(device).train()
    optimizer = plain_adamw(model, config)
    data, max_norm = batches(regime, device), config.train.grad_clip_norm
    assert max_norm is not None

    def step() -> Tensor:
        ids = next(data).input_ids[0]
        with _autocast(device, precision):
            loss = model(input_ids=ids, labels=ids).loss  # the model shifts the labels itself
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Runner("transformers", step)


SIDES: dict[str, Build] = {"transformers": peer_runner, "forge": forge_runner}
"""In the order of their turns."""


def build_llama(model: ModelConfig) -> Any:
    """`LlamaForCausalLM` of a forge model's shape, on the CPU in fp32.

    Raises:
        RunError: transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise RunError("the peer is transformers, which is not installed: pip install -e '.[bench]'") from None
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.dim,
            intermediate_size=model.ffn_width,
            num_hidden_layers=model.n_layers,
            num_attention_heads=model.query_heads,
            num_key_value_heads=model.kv_heads,
            max_position_embeddings=model.max_seq_len,
            rms_norm_eps=model.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
            tie_word_embeddings=model.tied_embeddings,
            attn_implementation="sdpa",  # type: ignore[call-arg]  # among its **kwargs
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


_LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn.wq": "self_attn.q_proj",
    "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj",
    "attn.wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.w_gate": "mlp.gate_proj",
    "mlp.w_up": "mlp.up_proj",
    "mlp.w_down": "mlp.down_proj",
}


def llama_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """forge's weights by Llama's names. Both rotate the pairs (x[i], x[i + d/2]), so no row moves."""
    outside = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}

    def llama_name(name: str) -> str:
        module = name.removesuffix(".weight")
        if module in outside:
            return f"{outside[module]}.weight"
        _, layer, inner = module.split(".", 2)
        return f"model.layers.{layer}.{_LLAMA_NAMES[inner]}.weight"

    return {llama_name(name): weight for name, weight in weights.items()}


def plain_adamw(model: torch.nn.Module, config: JobConfig) -> torch.optim.AdamW:
    """Fused AdamW with forge's numbers and forge's two groups: matrices decay, norms and embedding do not."""
    chosen = config.optimizer
    assert isinstance(chosen, AdamW)
    roles = parameter_roles(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in model.named_parameters() if decays(roles[name]) is decayed], "weight_decay": decay}
        for decayed, decay in ((True, chosen.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=chosen.lr, betas=(chosen.beta1, chosen.beta2), eps=chosen.eps, fused=True)


def _autocast(device: Device, precision: Precision) -> AbstractContextManager[Any]:
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
