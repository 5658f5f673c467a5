"""The built-in world (generated instructions, preferences over answers, and a judge that knows the truth) and the demo,
which trains a model in it.

``facts`` reads world.toml, ``world`` makes records of its facts, ``judge`` scores responses; these load no torch.
``pipeline`` runs the demo with the settings in ``recipe/``, ``measure`` measures the outcome.
"""
