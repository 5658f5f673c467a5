"""The built-in world: generated instructions, preferences over answers to them, the judge that knows the truth, and the
demo, which trains a model in it.

``facts`` holds the tables, ``world`` makes records of them, ``judge`` scores responses; none of these loads torch.
``pipeline`` runs the demo, ``recipe/`` holds its settings, ``measure`` says what came of it, ``story`` tells it.
"""
