"""Greedy evaluation answers what transformers' own generate answers, token by token."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from heedful import Message, ScoresConfig, evaluate_scores
from heedful.data.chat import Renderer, stop_ids

QUESTIONS = [
    "你好，今天天气怎么样？",
    "a",
    "二加三等于几",
    "Name three fruits, please.",
    "解释一下",
    "好" * 30,
    "x = 1;",
]


def test_greedy_evaluation_is_generate(decoder, written, cpu):
    """Texts and messages of very different lengths in one batch, Chinese among them; generate has one at a time, without
    padding."""
    asked = [*QUESTIONS[:4], *((Message("user", text),) for text in QUESTIONS[2:])]
    prompts = [*QUESTIONS[:4], *([{"role": "user", "content": text}] for text in QUESTIONS[2:])]
    data, seen = written([{"prompt": prompt} for prompt in prompts]), []

    def noted(completion_ids, truncated, **_):
        seen.extend(zip(completion_ids, truncated, strict=True))
        return [0.0] * len(completion_ids)

    config = ScoresConfig(model=decoder, data=data, temperature=0.0, max_new_tokens=16, micro_batch_size=4, **cpu)
    evaluate_scores(config, rewards=[noted])
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    model = AutoModelForCausalLM.from_pretrained(decoder, dtype=torch.float32).eval()
    renderer = Renderer(tokenizer)
    stops = stop_ids(renderer, model.generation_config.eos_token_id)
    expected = []
    for prompt in asked:
        ids = torch.tensor([renderer.prompt_ids(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16,
            eos_token_id=list(stops), pad_token_id=renderer.pad_id,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        ended = out[-1] in stops
        expected.append((out[:-1] if ended else out, not ended))
    assert [(list(ids), cut) for ids, cut in seen] == expected
    assert len({tuple(ids) for ids, _ in seen}) > 3, "models that always say the same would show nothing"
