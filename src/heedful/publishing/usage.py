"""How to use a model without heedful, as code for its card. Tests run it."""

from dataclasses import dataclass

from heedful.publishing.facts import RunFacts

POLICY = """\
```python
{imports}

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {model_class}.from_pretrained("{name}")
{encode}
output = model.generate(**inputs, max_new_tokens={length})
print(tokenizer.decode(output[0][inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```"""
CHAT = """\
messages = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""
RAW = """inputs = tokenizer("What is the capital of France?", return_tensors="pt")"""
REWARD = """\
```python
import torch
{imports}

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {model_class}.from_pretrained("{name}"{labels})
{encode}
with torch.no_grad():
    print(model(**inputs).logits[0, 0].item())
```"""
CHAT_PAIR = """\
messages = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "It is Paris."},
]
inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)"""
RAW_PAIR = """inputs = tokenizer("The capital of France is" + " Paris." + tokenizer.eos_token, return_tensors="pt")"""
PAIR_OF_TEXTS = """inputs = tokenizer("What is the capital of France?", "It is Paris.", return_tensors="pt")"""


@dataclass(frozen=True)
class Form:
    """What of a model decides how it is loaded and asked."""

    has_adapters: bool
    """LoRA adapters instead of a model."""
    on_adapters: bool
    """They were trained on a base that is adapters too."""
    has_template: bool
    """The tokenizer has a chat template."""
    reads_pairs: bool
    """A reward model that is an encoder, which reads prompt and response as two texts."""


def usage(name: str, facts: RunFacts, form: Form) -> str:
    """The section of a card: code for transformers (PEFT for adapters), and the command of heedful."""
    prefix = "AutoPeftModel" if form.has_adapters else "AutoModel"
    if facts.algorithm == "reward":
        code = REWARD.format(
            imports=_imports(f"{prefix}ForSequenceClassification", form),
            model_class=f"{prefix}ForSequenceClassification",
            name=name,
            labels=", num_labels=1" if form.has_adapters else "",
            encode=PAIR_OF_TEXTS if form.reads_pairs else CHAT_PAIR if form.has_template else RAW_PAIR,
        )
        return (
            f"{code}\n\nHigher is better. In heedful: `heedful ppo --rewards model:{name} ...`, which reads a conversation "
            "as it was read in training, up to the token that ends the answer, and takes off the offset in heedful.json, if "
            "there is one."
        )
    code = POLICY.format(
        imports=_imports(f"{prefix}ForCausalLM", form),
        model_class=f"{prefix}ForCausalLM",
        name=name,
        encode=CHAT if form.has_template else RAW,
        length=facts.settings.get("max_new_tokens") or 256,
    )
    return f"{code}\n\nIn a terminal: `heedful chat --model {name}`."


def _imports(model_class: str, form: Form) -> str:
    if form.has_adapters:
        return f"from peft import {model_class}\nfrom transformers import AutoTokenizer"
    return f"from transformers import {model_class}, AutoTokenizer"
