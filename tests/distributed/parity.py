"""When two layouts count as one training."""

from __future__ import annotations

import torch

from tests.distributed.training import Curve


def assert_same_curve(
    found: Curve, expected: Curve, *, losses: float = 1e-5, norms: float = 1e-4, params: float = 2e-4
) -> None:
    """Losses and gradient norms within relative bounds, final parameters to rounding, initial ones bit for bit."""
    assert found.start.keys() == expected.start.keys()
    for name, tensor in expected.start.items():
        assert torch.equal(found.start[name], tensor), f"{name} starts from other values"
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=losses, atol=0)
    torch.testing.assert_close(torch.tensor(found.norms), torch.tensor(expected.norms), rtol=norms, atol=0)
    assert found.tokens == expected.tokens
    for name, tensor in expected.params.items():
        torch.testing.assert_close(
            found.params[name], tensor, rtol=1e-3, atol=params, msg=lambda m, name=name: f"{name}: {m}"
        )
