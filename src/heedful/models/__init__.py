"""The networks (policy, reward model, value model) and their tokenizers: in memory, on disk, and on the Hub.

>>> from heedful.models import load_policy, load_tokenizer

``__init__.pyi`` lists the public names, which are imported at first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
