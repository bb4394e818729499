"""litgpt's GPT and torchtitan's Llama 3, each with its own loss, in the plain loop that its own pretraining is.

Both run eagerly, as every peer does; `litgpt pretrain` would compile its model. Each is imported where it runs: in a
process that sees its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import Runner, autocast, batches, plain_step, published_weights
from benchmarks.regimes import Device, Precision, Regime, job_config
from forge.config import ModelConfig
from forge.data.batch import Batch


def litgpt_runner(
    regime: Regime, device: Device, precision: Precision, weights: Mapping[str, Tensor] | None = None
) -> Runner:
    """litgpt's GPT and `chunked_cross_entropy`, as `litgpt/pretrain.py` has them on one device."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from litgpt.utils import chunked_cross_entropy

    config = job_config(regime, device, precision)
    described = Config(**_litgpt_shapes(config.model))
    model = GPT(described)
    if weights is None:
        model.apply(model._init_weights)
    else:
        converted: dict[str, Tensor] = {}
        copy_weights_hf_llama(described, {}, converted, published_weights(config.model, weights))
        model.load_state_dict(converted, strict=True)
    model.to(device)

    def loss_of(batch: Batch) -> Tensor:
        with autocast(device, precision):
            loss: Tensor = chunked_cross_entropy(model(batch.input_ids[0]), batch.labels[0])
        return loss

    return Runner("litgpt", plain_step(dict(model.named_parameters()), config, loss_of, batches(regime, device)))


def _litgpt_shapes(model: ModelConfig) -> dict[str, Any]:
    return {
        "block_size": model.max_seq_len,
        "n_layer": model.n_layers,
        "n_embd": model.dim,
        "padded_vocab_size": model.vocab_size,
        "n_head": model.query_heads,
        "n_query_groups": model.kv_heads,
        "head_size": model.head_width,
        "rope_base": model.rope_theta,
        "rotary_percentage": 1.0,
        "norm_class_name": "RMSNorm",
        "norm_eps": model.norm_eps,
        "parallel_residual": False,
        "bias": False,
        "mlp_class_name": "LLaMAMoE" if model.moe.n_experts else "LLaMAMLP",
        "intermediate_size": model.ffn_width,
        "moe_intermediate_size": model.expert_width,
        "n_expert": model.moe.n_experts,
        "n_expert_per_token": model.moe.top_k,
    }


def torchtitan_runner(
    regime: Regime, device: Device, precision: Precision, weights: Mapping[str, Tensor] | None = None
) -> Runner:
    """torchtitan's Llama 3, its loss and its `clip_grad_norm_`, as `torchtitan/train.py` has them on one device."""
    from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.llama3 import Llama3StateDictAdapter, Transformer, TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs

    config = job_config(regime, device, precision)
    shapes = _torchtitan_shapes(config.model) | {"rope_scaling_args": RoPEScalingArgs(scaling_factor=1.0)}
    described = TransformerModelArgs(**shapes)
    model = Transformer(described)
    if weights is None:
        with torch.no_grad():
            model.init_weights()
    else:
        converted = Llama3StateDictAdapter(described, None).from_hf(published_weights(config.model, weights))
        model.load_state_dict(converted, strict=True)
    model.to(device)

    def loss_of(batch: Batch) -> Tensor:
        labels = batch.labels[0]
        valid_tokens = (labels != IGNORE_INDEX).sum().float()
        with autocast(device, precision):
            loss: Tensor = cross_entropy_loss(model(batch.input_ids[0]), labels) / valid_tokens
        return loss

    # The head by the name that tells Muon to leave it alone.
    params = {name.replace("output.", "lm_head."): param for name, param in model.named_parameters()}
    return Runner("torchtitan", plain_step(params, config, loss_of, batches(regime, device), clip_grad_norm_))


def _torchtitan_shapes(model: ModelConfig) -> dict[str, Any]:
    return {
        "dim": model.dim,
        "n_layers": model.n_layers,
        "n_heads": model.query_heads,
        "n_kv_heads": model.kv_heads,
        "vocab_size": model.vocab_size,
        "multiple_of": model.ffn_width,  # two thirds of four widths, rounded up to a multiple of this
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "max_seq_len": model.max_seq_len,
    }
