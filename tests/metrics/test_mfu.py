"""The PaLM estimate, the table of peaks, and MFU."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from attrs import evolve

from forge.config import ModelConfig, MoEConfig
from forge.errors import ConfigError, RunError
from forge.metrics import (
    compute_mfu,
    device_peak_tflops,
    estimate_model_flops_per_token,
    get_gpu_peak_tflops,
    measure_cpu_peak_tflops,
    mfu,
    peak_tflops_by_name,
)

LLAMA_2_7B = ModelConfig(dim=4096, n_layers=32, n_heads=32, ffn_hidden_dim=11008, vocab_size=32000, max_seq_len=4096)
LLAMA_3_8B = evolve(LLAMA_2_7B, n_kv_heads=8, ffn_hidden_dim=14336, vocab_size=128256, max_seq_len=8192)
WIDE_HEADS = ModelConfig(
    dim=2048, n_layers=18, n_heads=8, n_kv_heads=1, head_dim=256, ffn_hidden_dim=16384, vocab_size=256000,
    max_seq_len=8192,
)  # fmt: skip
MIXTRAL = evolve(LLAMA_2_7B, n_kv_heads=8, ffn_hidden_dim=14336, moe=MoEConfig(n_experts=8, top_k=2))


@pytest.mark.parametrize(
    ("config", "flops"),
    [
        (LLAMA_2_7B, 46_084_915_200),
        (LLAMA_3_8B, 57_912_852_480),
        (WIDE_HEADS, 18_660_458_496),
        (MIXTRAL, 82_927_681_536),
    ],
)
def test_palm_estimate_has_the_published_values(config, flops):
    assert estimate_model_flops_per_token(config) == flops
    assert (
        estimate_model_flops_per_token(evolve(config, max_seq_len=2 * config.max_seq_len), config.max_seq_len) == flops
    )


def test_palm_estimate_counts_a_tied_head_and_no_lookup():
    tied = evolve(WIDE_HEADS, tied_embeddings=True, position="learned")
    assert estimate_model_flops_per_token(tied) == estimate_model_flops_per_token(WIDE_HEADS)


def test_palm_estimate_of_a_plain_mlp_has_two_matrices():
    plain = ModelConfig(dim=256, n_layers=1, ffn_hidden_dim=1024, mlp="gelu")
    gated = evolve(plain, mlp="swiglu")
    assert estimate_model_flops_per_token(gated) - estimate_model_flops_per_token(plain) == 6 * 256 * 1024


def test_palm_estimate_of_experts_falls_with_their_width():
    wide = ModelConfig(dim=64, n_layers=1, ffn_hidden_dim=256, moe=MoEConfig(n_experts=8, top_k=2))
    quarter = evolve(wide, moe=evolve(wide.moe, expert_hidden_dim=64))
    difference = estimate_model_flops_per_token(wide) - estimate_model_flops_per_token(quarter)
    assert difference == 6 * 2 * 3 * 64 * (256 - 64)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 4090 D", 147),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI250X / MI250", 191.5),
    ],
)
def test_peak_is_that_of_the_longest_known_name(name, peak):
    assert peak_tflops_by_name(name) == peak


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "NVIDIA RTX A4000",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce GTX 1080",
    ],
)
def test_a_name_that_only_looks_like_a_known_one_is_unknown(name):
    assert peak_tflops_by_name(name) is None


def test_every_gpu_of_the_specification_is_known():
    wanted = (
        "V100, A10, A10G, A100, A100 PCIe, A30, A40, L4, L40, L40S, H100, H100 PCIe, H100 NVL, H200, H800, H20, GH200,"
        " B100, B200, GB200, B300, RTX 3090, RTX 4090, RTX 5090, RTX A6000, RTX 6000 Ada, MI210, MI250X, MI300X,"
        " MI325X, MI355X"
    )
    assert not [name for name in wanted.split(", ") if peak_tflops_by_name(name.strip()) is None]


@pytest.mark.parametrize(
    ("capability", "processors", "ghz", "known"),
    [
        ((7, 0), 80, 1.53, "V100"),
        ((8, 0), 108, 1.41, "A100"),
        ((8, 6), 82, 1.695, "RTX 3090"),
        ((8, 9), 128, 2.52, "RTX 4090"),
        ((9, 0), 132, 1.83, "H100"),
        ((10, 0), 148, 1.85, "B200"),
        ((12, 0), 170, 2.407, "RTX 5090"),
    ],
)
def test_estimate_by_capability_meets_the_datasheets(capability, processors, ghz, known):
    assert mfu.estimate_peak_tflops(capability, processors, ghz) == pytest.approx(mfu.PEAK_TFLOPS[known], rel=0.02)


def test_a_capability_between_known_ones_is_taken_as_the_older():
    assert mfu.estimate_peak_tflops((8, 7), 16, 1.3) == mfu.estimate_peak_tflops((8, 6), 16, 1.3)
    assert mfu.estimate_peak_tflops((6, 1), 20, 1.6) > 0


class _Properties:
    major, minor, multi_processor_count, clock_rate = 9, 0, 132, 1_830_000


def test_an_unknown_gpu_warns_once_and_is_estimated(monkeypatch):
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H999 test")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Properties)
    monkeypatch.setattr(mfu._logger, "handle", records.append)
    assert get_gpu_peak_tflops() == get_gpu_peak_tflops() == pytest.approx(989, rel=0.02)
    assert [record.levelname for record in records] == ["WARNING"]
    assert "NVIDIA H999 test" in records[0].getMessage()


def test_a_known_gpu_is_looked_up_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["NVIDIA L4", "NVIDIA H100 PCIe"].__getitem__)
    assert get_gpu_peak_tflops(1) == device_peak_tflops(torch.device("cuda", 1), torch.float32) == 756


def test_a_gpu_that_is_not_there_is_an_error_that_names_it():
    with pytest.raises(RunError, match="no CUDA device 97"):
        get_gpu_peak_tflops(97)


def test_cpu_peak_is_measured_once_and_quickly():
    state = torch.get_rng_state()
    start = time.perf_counter()
    peak = measure_cpu_peak_tflops(torch.bfloat16)
    assert time.perf_counter() - start < 5  # under a second, on a machine that others use too
    assert 1e-5 < peak < 1e3
    assert measure_cpu_peak_tflops(torch.bfloat16) == device_peak_tflops(torch.device("cpu"), torch.bfloat16) == peak
    assert torch.equal(torch.get_rng_state(), state)


def test_cpu_peak_does_not_wait_for_a_dtype_that_is_slow(monkeypatch):
    seconds, now = [], [0.0]

    def slow_product(matrix, _):
        seconds.append(matrix.shape[0] ** 3 / 64**3 * 0.01)  # 50 MFLOP/s
        now[0] += seconds[-1]

    monkeypatch.setattr(mfu.torch, "mm", slow_product)
    monkeypatch.setattr(mfu.time, "perf_counter", lambda: now[0])
    assert mfu._measure_cpu.__wrapped__(torch.float32, 1) == pytest.approx(2 * 64**3 / 0.01 / 1e12)
    assert sum(seconds) < 1


def test_mfu_is_flops_a_second_over_the_peak_of_all_devices():
    tokens_per_sec = 4 * 312e12 / estimate_model_flops_per_token(LLAMA_2_7B)
    assert compute_mfu(LLAMA_2_7B, tokens_per_sec, num_gpus=4, gpu_peak_tflops=312) == pytest.approx(1)
    assert compute_mfu(LLAMA_2_7B, tokens_per_sec, num_gpus=8, gpu_peak_tflops=312) == pytest.approx(0.5)


def test_mfu_uses_the_sequence_length_trained_on():
    short, long = (compute_mfu(LLAMA_2_7B, 1e3, 1, 312, seq_len=s) for s in (1024, 4096))
    assert short == pytest.approx(1e3 * estimate_model_flops_per_token(LLAMA_2_7B, 1024) / 312e12)
    assert long == compute_mfu(LLAMA_2_7B, 1e3, 1, 312) > short


def test_mfu_finds_the_peak_of_the_machine():
    config = ModelConfig(dim=64, n_layers=1)
    assert compute_mfu(config, 10.0) > 0


def test_mfu_over_no_device_is_an_error():
    with pytest.raises(ConfigError, match="0 x 312"):
        compute_mfu(LLAMA_2_7B, 1.0, num_gpus=0, gpu_peak_tflops=312)
