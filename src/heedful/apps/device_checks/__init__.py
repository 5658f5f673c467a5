"""Checks of training and sampling on a device: ``heedful doctor --device cuda``."""
