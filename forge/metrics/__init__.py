"""What a run reports: FLOPs and MFU, memory, the tracker of training steps, and the sinks that it writes to."""

from forge.metrics.flops import ParameterCount, attention_pairs, count_flops_per_token, count_parameters
from forge.metrics.logger import format_metrics, get_logger, wants_color
from forge.metrics.memory import (
    DeviceMemoryMonitor,
    format_memory_stats,
    get_memory_stats,
    get_memory_utilization,
    reset_peak_memory,
)
from forge.metrics.mfu import (
    compute_mfu,
    device_peak_tflops,
    estimate_model_flops_per_token,
    get_gpu_peak_tflops,
    measure_cpu_peak_tflops,
    peak_tflops_by_name,
)
from forge.metrics.sinks import ConsoleSink, JsonlSink, Sink, TensorBoardSink, WandbSink, build_sinks
from forge.metrics.tracker import MetricsTracker, StepMetrics

__all__ = [
    "ConsoleSink", "DeviceMemoryMonitor", "JsonlSink", "MetricsTracker", "ParameterCount", "Sink", "StepMetrics",
    "TensorBoardSink", "WandbSink", "attention_pairs", "build_sinks", "compute_mfu", "count_flops_per_token",
    "count_parameters", "device_peak_tflops", "estimate_model_flops_per_token", "format_memory_stats",
    "format_metrics", "get_gpu_peak_tflops", "get_logger", "get_memory_stats", "get_memory_utilization",
    "measure_cpu_peak_tflops", "peak_tflops_by_name", "reset_peak_memory", "wants_color",
]  # fmt: skip
