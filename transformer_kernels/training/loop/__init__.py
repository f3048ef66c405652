"""The training loop: optimizers, captured steps, measures."""
