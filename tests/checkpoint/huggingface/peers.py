"""Tiny models of `transformers`, with random weights everywhere, saved as it saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch.func import functional_call

from forge.model import build_model
from forge.training.reload import load_run

VOCAB = 40
_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 6}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied and windowed": (
        "Qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3", {"head_dim": 6}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 6, "decoder_sparse_step": 2}),
    "qwen3_moe normed": ("Qwen3Moe", {**_EXPERTS, "head_dim": 6, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {}),
    "gpt2 untied": ("GPT2", {"tie_word_embeddings": False, "n_inner": 24}),
}


def peer(name: str) -> Any:
    """The model, every parameter random."""
    import transformers

    stem, own = PEERS[name]
    common = _COMMON
    if stem == "GPT2":
        common = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": None,
                  "eos_token_id": None}  # fmt: skip
    kind = "GPT2LMHeadModel" if stem == "GPT2" else f"{stem}ForCausalLM"
    model = getattr(transformers, kind)(getattr(transformers, f"{stem}Config")(**common, **own)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def saved_peer(name: str, folder: Path, **options: Any) -> Any:
    """The model, saved with a tokenizer into a folder."""
    model = peer(name)
    model.save_pretrained(folder, **options)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """Letters, an unknown, a begin and an end."""
    letters = {chr(ord("a") + n): n for n in range(26)} | {"<unk>": 26}
    inner = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    inner.save(str(folder / "tokenizer.json"))
    begin = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": False, "normalized": False}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def ids() -> torch.Tensor:
    """Two sequences as long as the models take."""
    return torch.randint(VOCAB, (2, 32), generator=torch.Generator().manual_seed(1))


def peer_logits(model: Any) -> torch.Tensor:
    """fp32 logits of `ids` by `transformers`."""
    with torch.no_grad():
        return model(ids()).logits.float()


def run_logits(run_dir: Path) -> torch.Tensor:
    """fp32 logits of `ids` by the newest checkpoint of a run."""
    trained = load_run(run_dir, device="cpu")
    with torch.no_grad():
        return functional_call(build_model(trained.config.model), trained.params(), (ids(),))
