"""The gradient of models as one vector, and how far two of them are apart."""

import torch


def flat_gradient(*modules):
    """The gradients that there are, one after another."""
    return torch.cat([p.grad.flatten() for module in modules for p in module.parameters() if p.grad is not None])


def distance(a, b):
    """Of two gradients, over the size of the second."""
    return float((a - b).norm() / b.norm())
