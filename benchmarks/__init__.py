"""forge's training step against a named peer, in one run: `python -m benchmarks --help`."""
