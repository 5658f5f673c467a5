"""People in the loop: the page where they label, its store, who gets which item, agreement between people, import and export.

>>> from heedful.label import Project

``__init__.pyi`` lists what is public here. Never loads torch; what models write comes from a process of its own
(`heedful.rounds.sample`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
