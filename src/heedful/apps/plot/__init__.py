"""Pictures of training: tokens with their numbers, the clipped objective, advantages, learning curves.

>>> from heedful import plot
>>> for step, experience, metrics in heedful.ppo_steps(config, policy, prompts, rewards=[brevity]):
...     figure = plot.experience(experience, 0, policy.tokenizer)

Each function returns a figure of matplotlib, which a notebook shows, and writes it to ``path`` if one is given (.png, .svg or
.pdf). Colours follow matplotlib's style: ``matplotlib.style.use("dark_background")`` makes dark pictures.

Names, and matplotlib, are loaded when they are first used. ``__init__.pyi`` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
