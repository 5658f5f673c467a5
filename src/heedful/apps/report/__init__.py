"""Runs shown to people: a self-contained page, the same in the terminal, and the page served during training."""
