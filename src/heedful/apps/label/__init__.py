"""Labelling by people: the page, its store, assignment of items, agreement statistics, import and export.

>>> from heedful.apps.label import Project

``__init__.pyi`` lists what is public here. Never loads torch; a separate process writes model answers
(`heedful.apps.rounds.sample`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
