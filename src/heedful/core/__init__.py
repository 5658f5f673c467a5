"""The mathematics of learning from human feedback: pure functions of tensors and numbers.

Shapes: B responses, T tokens, V vocabulary. Masks are boolean; True marks entries that count. float16 and bfloat16
are computed in float32; float64 stays float64. Every function raises ValueError with both shapes if its tensors do not have
the annotated ones: torch would repeat the smaller one. Needs only torch and jaxtyping. The public names are each module's
``__all__``.
"""

from types import ModuleType as _Module

from heedful.core.advantages import *
from heedful.core.agreement import *
from heedful.core.best_of_n import *
from heedful.core.direct_losses import *
from heedful.core.distillation import *
from heedful.core.entropy_control import *
from heedful.core.importance import *
from heedful.core.intervals import *
from heedful.core.kl_control import *
from heedful.core.logprobs import *
from heedful.core.masking import *
from heedful.core.overoptimisation import *
from heedful.core.policy_losses import *
from heedful.core.preference_losses import *
from heedful.core.responses import *
from heedful.core.rounding import *
from heedful.core.score_norm import *
from heedful.core.surrogates import *
from heedful.core.turns import *
from heedful.core.value_bins import *
from heedful.core.values import *

__all__ = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _Module)]
