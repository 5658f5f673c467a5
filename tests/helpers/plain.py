"""What plain transformers say of models that heedful trains."""

import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def random_text():
    """Up to twenty characters, Chinese among them, of Python's random numbers."""
    return "".join(random.choices("abc苹果 ", k=random.randint(1, 20)))


def log_prob(model, prompt, response):
    """Of a whole response, one row at a time."""
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
    return sum(logprobs[len(prompt) + i - 1, token] for i, token in enumerate(response))


def preference(folder):
    """log P("az") - log P("aq") after a prompt: only the last letter differs."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("第7题a", add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    z, q = (tokenizer(letter, add_special_tokens=False).input_ids[0] for letter in "zq")
    return float(logits[z] - logits[q])
