"""Time by kind: by hand on made-up traces, as a law on random ones, and on a trace of torch's own profiler."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function

from forge.errors import RunError
from forge.metrics.timeline import DATA, KINDS, LOSS, OPTIMIZER, STEP, format_timeline, read_timeline, span, timeline


def _event(cat, name, start, end, tid=1, **args):
    names = {"id": "External id", "seq": "Sequence number", "fwd": "Fwd thread id"}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start,
            "args": {names[key]: value for key, value in args.items()}}  # fmt: skip


def _op(name, start, end, **args):
    return _event("cpu_op", name, start, end, **args)


def _range(name, start, end, **args):
    return _event("user_annotation", name, start, end, **args)


def _kernel(name, start, end, id, cat="kernel"):
    return _event(cat, name, start, end, tid=7, id=id)


def _nonzero(times):
    return {kind: time for kind, time in times.items() if time}


def test_a_step_on_a_cpu_by_hand():
    found = timeline(
        [
            _range(STEP, 0, 100),
            _range(DATA, 0, 10),
            _op("aten::copy_", 2, 4),
            _op("aten::linear", 10, 30),
            _op("aten::t", 10, 12),
            _op("aten::addmm", 12, 30),
            _op("aten::_scaled_dot_product_flash_attention", 32, 40),
            _op("aten::mul", 40, 45),
            _range(LOSS, 45, 60, id=1),
            _op("aten::mm", 46, 58, seq=3),
            _op("autograd::engine::evaluate_function: MmBackward0", 60, 70, seq=3, fwd=1),
            _op("aten::mm", 61, 69),
            _range(OPTIMIZER, 70, 95),
            _op("aten::_foreach_mul_", 71, 90),
            _op("c10d::allreduce_", 91, 94),
            _op("aten::mul", 0, 100, tid=2),  # the thread that makes batches
            _op("aten::mul", 120, 130),  # after the window
            {"ph": "i", "name": "Iteration Start", "ts": 0},
        ]
    )
    assert (found.steps, found.wall, found.device) == (1, 100, None)
    assert _nonzero(found.host) == {
        "data": 10,
        "matmul": 20,
        "attention": 8,
        "other": 5,
        "loss": 12 + 10,
        "optimizer": 19,
        "communication": 3,
        "idle": 13,
    }
    assert found.operators["aten::mm"] == 20 and found.operators["aten::linear"] == 0


def test_a_step_on_a_device_by_hand():
    found = timeline(
        [
            _range(STEP, 0, 100),
            _range(DATA, 0, 5),
            _range(DATA, 80, 100),
            _op("aten::copy_", 3, 5, id=1),
            _op("aten::mm", 6, 8, id=2),
            _range(OPTIMIZER, 8, 12),
            _op("aten::_foreach_mul_", 8, 12, id=3),
            _op("ThirdPartyOp", 12, 13, id=4),
            _op("aten::mm", 6, 7, tid=2, id=5),  # the thread of the backward pass
            _kernel("Memcpy HtoD", 4, 9, 1, cat="gpu_memcpy"),
            _kernel("sm90_xmma_gemm", 10, 30, 2),
            _kernel("ncclDevKernel_ReduceScatter", 20, 40, 99),
            _kernel("multi_tensor_apply_kernel", 45, 60, 3),
            _kernel("flash_fwd_kernel", 60, 70, 4),
            _kernel("nvjet_hsh", 70, 75, 5),
            _kernel("elementwise", 90, 120, 98),
        ]
    )
    assert _nonzero(found.device) == {
        "data": 9 + 10,  # the host waits for it, or it is copied; then a kernel runs while the host waits
        "matmul": 20 + 5,
        "communication": 10,  # what is not behind the matrix product
        "optimizer": 15,
        "attention": 10,
        "other": 10,
        "idle": 100 - 19 - 25 - 10 - 15 - 10 - 10,
    }
    assert found.operators["sm90_xmma_gemm"] == 20
    table = format_timeline(found)
    assert "device, ms" in table and table.count("100.0%") == 2


NAMES = ["aten::mm", "aten::mul", "c10d::allreduce_", "aten::scaled_dot_product_attention", LOSS, OPTIMIZER, DATA]


@st.composite
def _trees(draw, start, end, depth=3):
    """Properly nested events within [start, end]."""
    cuts = sorted(draw(st.lists(st.integers(start, end), max_size=6)))
    events = []
    for low, high in zip(cuts[::2], cuts[1::2], strict=False):
        name = draw(st.sampled_from(NAMES))
        events.append((_range if name.startswith("forge") else _op)(name, low, high, id=len(events)))
        if depth:
            events += draw(_trees(low, high, depth - 1))
    return events


@settings(deadline=None, max_examples=60)
@given(
    _trees(0, 400),
    _trees(400, 1000),
    st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 300), st.sampled_from([*NAMES[:4], "ncclX"]))),
)
def test_every_moment_has_one_kind(first, second, kernels):
    events = [_range(STEP, 0, 400), *first, _range(STEP, 400, 1000), *second]
    events += [_kernel(name, start, start + dur, n) for n, (start, dur, name) in enumerate(kernels)]
    found = timeline(events)
    assert (found.steps, found.wall) == (2, 1000)
    for times in (found.host, found.device) if kernels else (found.host,):
        assert set(times) == set(KINDS) and min(times.values()) >= -1e-9
        assert sum(times.values()) == pytest.approx(1000)


def test_a_trace_of_torch_is_read(tmp_path):
    x, weight = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function(STEP):
        with span(DATA):
            torch.zeros(4)
        hidden = x @ weight
        with span(LOSS):
            loss = hidden.exp().sum()
        loss.backward()
        with span(OPTIMIZER):
            weight.detach().mul_(0.9)
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    found = read_timeline(tmp_path / "trace.json")
    assert all(found.host[kind] > 0 for kind in ("data", "matmul", "loss", "optimizer"))
    assert found.host["attention"] == found.host["communication"] == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    outside = [event for event in events if event.get("name") != "autograd::engine::evaluate_function: ExpBackward0"]
    assert timeline(outside).host["loss"] < found.host["loss"]  # the backward of the loss is the loss's
    assert sum(found.host.values()) == pytest.approx(found.wall)


def test_without_a_profiler_a_span_is_nothing():
    with span(LOSS) as entered:
        assert entered is None


@pytest.mark.parametrize(
    "content", ["", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}']
)
def test_a_file_that_is_no_trace_of_forge_is_one_error(tmp_path, content):
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(RunError, match=r"trace.json: no trace of a forge run"):
        read_timeline(tmp_path / "trace.json")
    with pytest.raises(RunError, match="nowhere: cannot be read"):
        read_timeline(tmp_path / "nowhere")
