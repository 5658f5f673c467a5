"""One tiny policy per decoder, made once."""

import pytest
import torch

from architectures import DECODERS
from cases import often
from heedful import make_tiny_model
from heedful.models import load_policy
from sampling import sharpened


@pytest.fixture(scope="session")
def policies(tmp_path_factory):
    """Policies by architecture. Read-only."""
    root = tmp_path_factory.mktemp("policies")
    loaded = {}
    for architecture in DECODERS:
        make_tiny_model(architecture, root / architecture, hidden_size=32)
        policy = load_policy(
            str(root / architecture), device=torch.device("cpu"), compute_dtype=torch.float32, with_value_head=True
        )
        torch.manual_seed(11)
        sharpened(policy.lm)
        with torch.no_grad():
            policy.value_head.weight.normal_()
            policy.value_head.out.weight.normal_()
        loaded[architecture] = policy.eval()
    return loaded


@pytest.fixture(params=often(DECODERS, ("gpt2", "qwen3")))
def policy(request, policies):
    """The policy of each decoder in turn. llama and qwen2 are qwen3 with less or more, so their tests are exhaustive."""
    return policies[request.param]
