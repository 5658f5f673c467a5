"""The built-in world: generated instructions, preferences over answers to them, and the judge that knows the truth.

``facts`` holds the tables, ``world`` makes records of them, ``judge`` scores responses. None of them loads torch.
"""
