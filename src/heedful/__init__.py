"""heedful trains language models that heed human feedback: SFT, reward models, PPO, GRPO, DPO, in one process.

>>> import heedful
>>> config = heedful.PPOConfig(model="runs/sft/final", data="prompts.jsonl", output="runs/ppo")
>>> config.kl_coef
0.05

Names are loaded when they are first used, so that ``import heedful`` does not load torch. ``__init__.pyi`` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
