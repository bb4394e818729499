"""Token data: a batch is a pure function of (config, step)."""
