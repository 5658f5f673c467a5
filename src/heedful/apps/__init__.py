"""What people run around training: labels, rounds, reports, pictures, exam, doctor, cards, demo, course, servers.

Nothing below imports an application. What is public of them has a name in `heedful`: `plot`, `course`, `run_demo`, `examine`,
`serve_reward`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
