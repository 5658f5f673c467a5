# What heedful.models exports, and from where.
from .adapters import add_adapters as add_adapters
from .load import load_causal_lm as load_causal_lm
from .load import load_policy as load_policy
from .load import load_reward_model as load_reward_model
from .load import load_trunk as load_trunk
from .load import load_value_model as load_value_model
from .policy import Policy as Policy
from .policy import freeze as freeze
from .reward_model import RewardModel as RewardModel
from .save import save_policy as save_policy
from .save import save_reward_model as save_reward_model
from .save import save_value_model as save_value_model
from .tiny import byte_tokenizer as byte_tokenizer
from .tokenizer import load_tokenizer as load_tokenizer
from .value_model import ValueModel as ValueModel
