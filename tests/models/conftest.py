"""One tiny checkpoint per architecture, made once."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from heedful.checkpoints.tiny import DECODERS, make_tiny_model


def sharpen(folder, kind):
    """Random weights are so small that every prediction is nearly uniform and no mistake shows; make them larger."""
    model = kind.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folders by architecture: causal language models, and for deberta-v2 a classifier. Read-only."""
    root = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(7)
    for architecture in (*DECODERS, "deberta-v2"):
        make_tiny_model(architecture, root / architecture, hidden_size=32)
        is_decoder = architecture in DECODERS
        sharpen(root / architecture, AutoModelForCausalLM if is_decoder else AutoModelForSequenceClassification)
    return {architecture: root / architecture for architecture in (*DECODERS, "deberta-v2")}


@pytest.fixture(params=DECODERS)
def decoder(request, checkpoints):
    """The folder of each decoder in turn."""
    return str(checkpoints[request.param])
