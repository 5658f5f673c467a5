"""Checks of training and sampling on a device: ``heedful doctor --device cuda``, and tests/test_gpu.py."""
