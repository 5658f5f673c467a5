# What heedful.plot exports, and from where.
from .critic_figure import critic as critic
from .grid import advantages as advantages
from .healthy import HEALTHY as HEALTHY
from .healthy import Band as Band
from .objective import clip_region as clip_region
from .run_curves import curves as curves
from .style import Picture as Picture
from .token_bands import experience as experience
from .token_bands import tokens as tokens
from .whole_tokens import token_texts as token_texts
