"""forge trains language models from scratch with one pure function: `state, result = train_step(state, batch)`."""

__version__ = "0.1.0"
