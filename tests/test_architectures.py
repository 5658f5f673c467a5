"""Every architecture, made tiny from its configuration: sampled, trained, saved and reloaded, or refused with the reason.

docs/results/architectures.md is this table, docs/architectures.md a summary of it; `python tests/test_architectures.py`
writes both again. `-m exhaustive` holds every row against the code, the ordinary suite a few of them.
"""

import itertools
import json
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from heedful import CheckpointError, PPOConfig, Prompt, RewardConfig, SFTConfig
from heedful.algorithms import ppo, sft
from heedful.algorithms import reward_model as reward
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.data.loading import EncodedPrompt
from heedful.engines.kv_cache import takes_slots
from heedful.engines.probe import ADVICE, PROVEN
from heedful.engines.teacher_forced import token_outputs
from heedful.kernels.packing import can_pack
from heedful.models import byte_tokenizer
from heedful.types import MicroBatch

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "results" / "architectures.md"
SUMMARY = DOCS / "architectures.md"
LIMIT = 1e-4
"""The most that a sampled log-prob may differ from that of the whole text, in float32; logits are of size 10. The same for
scores in a batch, and for the logits of a reloaded model."""

SHAPE = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 6,
}  # fmt: skip
"""Passed to every configuration that has such a field."""
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
ROUTED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
IMAGES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 4,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
ROTATION = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}


@dataclass(frozen=True)
class Architecture:
    """What to make, and whether heedful takes it."""

    kind: str
    settings: dict = field(default_factory=dict)
    text: dict | None = None
    """Settings of the text model of one with images."""
    refused: str = ""


def of_kind(kind, **settings_by_type):
    return {name: Architecture(kind, settings) for name, settings in settings_by_type.items()}


FULL = {"sliding_window": None}
ENCODER = {"type_vocab_size": 2, "cls_token_id": 3, "sep_token_id": 4}
POLICIES = {
    **of_kind(
        "dense",
        gpt2={}, llama={}, qwen2={}, qwen3={}, gpt_neox={}, gpt_bigcode={}, gptj={"rotary_dim": 4},
        codegen={"rotary_dim": 4}, opt={"word_embed_proj_dim": 32, "ffn_dim": 64}, bloom={}, mpt={}, falcon={}, phi={},
        phi3=FULL, stablelm={}, starcoder2=FULL, gemma={}, granite={"logits_scaling": 8.0}, cohere={}, olmo={}, olmo2={},
        smollm3={"num_hidden_layers": 4}, seed_oss={}, helium={}, glm={}, glm4={}, hunyuan_v1_dense={}, nemotron={},
        apertus={}, arcee={}, ernie4_5={}, persimmon={}, diffllama={}, bitnet={}, nanochat={}, ministral3=FULL, jais2={},
        xglm={"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}, biogpt={}, doge=FULL,
    ),
    **of_kind(
        "sliding window",
        mistral={}, ministral=WINDOWS, gemma2={}, gemma3_text=WINDOWS, cohere2=WINDOWS, olmo3=WINDOWS, exaone4=WINDOWS,
        gpt_neo={"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8},
        gemma4_text=WINDOWS | {
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 264, "global_head_dim": 8,
            "num_kv_shared_layers": 0,
        },
    ),
    **of_kind(
        "mixture of experts",
        mixtral=FULL, qwen2_moe={"shared_expert_intermediate_size": 32}, qwen3_moe={}, olmoe={}, phimoe=FULL, granitemoe={},
        ernie4_5_moe={}, dots1=ROUTED, glm4_moe=ROUTED, hunyuan_v1_moe={}, minimax_m2={}, flex_olmo={}, jetmoe={},
        gpt_oss=WINDOWS, afmoe=WINDOWS,
    ),
    **of_kind(
        "latent attention (MLA)",
        deepseek_v2=LATENT | ROUTED, deepseek_v3=LATENT | ROUTED, glm4_moe_lite=LATENT | ROUTED, youtu=LATENT,
        minicpm3=LATENT,
        longcat_flash=LATENT | {
            "num_layers": 1, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2,
        },
    ),
    **of_kind(
        "hybrid",
        qwen3_next=DELTA | {"shared_expert_intermediate_size": 32}, qwen3_5_text=DELTA,
        lfm2={"layer_types": ["conv", "full_attention"]},
        lfm2_moe={"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        lfm3={"layer_types": ["conv", "full_attention"]},
        granitemoehybrid=MAMBA2 | {
            "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32, "logits_scaling": 8.0,
        },
        bamba=MAMBA2 | {"attn_layer_indices": [1]},
        falcon_h1=MAMBA2 | {"mamba_d_ssm": 64, "mamba_chunk_size": 16, "lm_head_multiplier": 0.25},
        nemotron_h={
            "num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 4,
            "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16,
        },
        jamba={
            "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        },
        olmo_hybrid={},
    ),
    **of_kind(
        "recurrent",
        mamba={"state_size": 8}, falcon_mamba={"state_size": 8},
        mamba2={"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    ),
    "qwen3_5": Architecture("with images", text=DELTA),
    "gemma3": Architecture("with images", {"mm_tokens_per_image": 4}, text=WINDOWS),
    "mistral3": Architecture("with images", {"vision_config": {"model_type": "pixtral"}}, text={"model_type": "mistral"}),
    "llava": Architecture(
        "with images",
        {"vision_config": {"model_type": "clip_vision_model"}},
        text={"model_type": "llama", "sliding_window": None},
    ),
    "qwen3_vl": Architecture("with images", text={"rope_parameters": ROTATION}, refused="has no causal language model"),
    "rwkv": Architecture("recurrent", {"attention_hidden_size": 32}, refused="would sample with other probabilities"),
    "xlstm": Architecture("recurrent", refused="cannot be sampled from with a cache"),
    "recurrent_gemma": Architecture("hybrid", refused="cannot be sampled from with a cache"),
    "minimax": Architecture("hybrid", refused="cannot be sampled from with a cache"),
    "llama4_text": Architecture("mixture of experts", refused="no separate trunk and output head"),
    "modernbert-decoder": Architecture(
        "sliding window", {"bos_token_id": 2} | ENCODER, refused="does not compute its logits by an output head"
    ),
    "bert-generation": Architecture("encoder", refused="would sample with other probabilities"),
}  # fmt: skip
REWARD_MODELS = {
    **of_kind(
        "encoder",
        **{
            "bert": ENCODER, "roberta": ENCODER, "xlm-roberta": ENCODER, "electra": ENCODER | {"embedding_size": 32},
            "albert": ENCODER | {"embedding_size": 32},
            "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
            "modernbert": ENCODER | {"bos_token_id": 3, "local_attention": 8},
            "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32},
        },
    ),
    **of_kind(
        "decoder",
        gpt2={}, llama={}, qwen2={}, qwen3={}, mistral={}, gemma2={}, gemma3_text=WINDOWS, mixtral=FULL, qwen3_moe={},
        deepseek_v3=LATENT | ROUTED, qwen3_next=DELTA | {"shared_expert_intermediate_size": 32}, qwen3_5_text=DELTA,
        jamba={"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    ),
    "qwen3_5": Architecture("with images", text=DELTA | {"pad_token_id": None}),
    "gemma3": Architecture("with images", {"mm_tokens_per_image": 4}, text=WINDOWS | {"pad_token_id": None}),
}  # fmt: skip
ORDINARY = {"policies": ["gemma2", "lfm2", "mamba", "llava", "rwkv"], "reward models": ["modernbert", "qwen3_5"]}
TEXTS = ("今天天气怎么样？", "a", "你好", "What is 2 + 2?")


def make(name, model_type, architecture, folder, auto):
    """Write a random model, with weights so large that predictions are far from uniform, and its tokenizer."""
    config_class = CONFIG_MAPPING[model_type]
    fields = set(config_class.__dataclass_fields__) | set(config_class.attribute_map)
    shape = {key: value for key, value in SHAPE.items() if key in fields or key.endswith("_token_id")}
    settings = shape | architecture.settings
    if architecture.text is not None:
        settings["text_config"] = SHAPE | architecture.text
        settings["vision_config"] = IMAGES | architecture.settings.get("vision_config", {})
        settings |= {"image_token_id": 260, "image_token_index": 260}
        settings = {k: v for k, v in settings.items() if k in fields}
    config = config_class(**settings, **({"num_labels": 1} if auto is AutoModelForSequenceClassification else {}))
    torch.manual_seed(len(name))
    if model_type == "bert-generation":
        auto = transformers.BertGenerationDecoder
        model = auto(config)
    else:
        model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    is_encoder = auto is AutoModelForSequenceClassification and architecture.kind == "encoder"
    byte_tokenizer(encoder=is_encoder).save_pretrained(folder)


def write(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


def settings_of(root, data, **more):
    return {
        "model": str(root / "model"), "data": data, "output": root / "never-written", "eval_fraction": 0.0,
        "learning_rate": 1e-3, "device": "cpu", "dtype": "float32", **more,
    }  # fmt: skip


def change(found, expected):
    assert bool(torch.isfinite(found).all())
    return float((found - expected).abs().max())


def reloaded(lm, folder, before):
    """How much the logits of the saved model differ in plain transformers; they are not those of before the step."""
    ids = torch.tensor([byte_tokenizer()(TEXTS[0]).input_ids])
    with torch.no_grad():
        logits, again = (
            model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            for model in (lm, AutoModelForCausalLM.from_pretrained(folder))
        )
    assert before is None or change(logits, before) > 1e-4, "the step changed nothing"
    return change(again, logits), logits


def length(completions, **_):
    return [float(len(completion)) for completion in completions]


@cache
def policy_row(name):
    """What becomes of an architecture as a policy: the message that refuses it, or the largest difference of a log-prob, how
    the cache is written, and whether texts are packed."""
    architecture = POLICIES[name]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        root = Path(folder)
        auto = AutoModelForCausalLM if architecture.text is None else AutoModelForImageTextToText
        make(name, name, architecture, root / "model", auto)
        records = [{"prompt": text, "completion": f"{text} 是" * (i + 1)} for i, text in enumerate(TEXTS)]
        data = write(root / "data.jsonl", records)
        try:
            learner, loaded = sft.start(SFTConfig(**settings_of(root, data, batch_size=4, max_steps=1)))
        except CheckpointError as error:
            return str(error).replace(f"{root / 'model'}", "MODEL").removesuffix(f". {ADVICE}")
        policy = learner.model
        lm, renderer = policy.lm, learner.sampler.renderer
        prompts = [EncodedPrompt(Prompt(text, "p"), renderer.prompt_ids(text)) for text in TEXTS] * 2
        rollouts = learner.sampler.generate(policy.eval(), prompts, torch.Generator().manual_seed(0))
        whole = token_outputs(policy, rollouts.batch, temperature=1.0, micro_batch=MicroBatch(8)).logprobs
        sampled = change(rollouts.logprobs, whole)
        in_place, packed = takes_slots(lm), can_pack(lm.base_model)
        saved, before = [], reloaded(lm, root / "model", None)[1] if architecture.text is None else None
        sft.learn(learner, loaded.train, SFTConfig(**settings_of(root, data)))
        learner.save(root / "sft")
        difference, before = reloaded(lm, root / "sft", before)
        saved.append(difference)
        config = PPOConfig(
            **settings_of(root, write(root / "prompts.jsonl", [{"prompt": text} for text in TEXTS])) | {
                "model": str(root / "sft"), "steps": 1, "rollout_batch_size": 4, "minibatch_size": 4,
                "max_new_tokens": 6, "lr_schedule": "constant",
            }
        )  # fmt: skip
        online = start(config, [length]).learner
        ppo.learn(online, ppo.make_experience(online, rollout(online, next(online.prompts))))
        online.save(root / "ppo")
        saved.append(reloaded(online.policy.lm, root / "ppo", before)[0])
    assert max(sampled, *saved) <= LIMIT, f"sampled {sampled:.1e}, saved and reloaded {max(saved):.1e}"
    return f"{sampled:.0e}", "in place" if in_place else "grows", "yes" if packed else "no"


@cache
def reward_row(name):
    """What becomes of an architecture as a reward model: the largest change of a score by the batch that it is in."""
    architecture = REWARD_MODELS[name]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        root = Path(folder)
        auto = AutoModelForSequenceClassification if architecture.text is None else AutoModelForImageTextToText
        make(name, name, architecture, root / "model", auto)
        records = [{"prompt": t, "chosen": f"{t} 好", "rejected": "不 " * (i + 1)} for i, t in enumerate(TEXTS)]
        config = RewardConfig(**settings_of(root, write(root / "data.jsonl", records), batch_size=4, max_steps=1))
        learner, loaded = reward.start(config)
        model, rows = learner.model.eval(), [row for one in loaded.train for row in one.rows]
        with torch.no_grad():
            first = model(rows)
            batched = change(torch.cat([model([row]) for row in rows]), first)
        reward.learn(learner, loaded.train, config)
        learner.save(root / "saved")
        plain = AutoModelForSequenceClassification.from_pretrained(root / "saved").eval()
        with torch.no_grad():
            scores = model.eval()(rows)
            again = torch.cat([plain(**{k: torch.tensor([v]) for k, v in row.items()}).logits[0] for row in rows])
    assert change(scores, first) > 1e-4, "the step changed nothing"
    assert max(batched, change(again, scores)) <= LIMIT
    return (f"{batched:.0e}",)


TABLES = {"policies": (POLICIES, policy_row), "reward models": (REWARD_MODELS, reward_row)}
ROWS = [(table, name) for table, (architectures, _) in TABLES.items() for name in architectures]
HEADINGS = {
    "policies": "| model type | kind | log-probs | cache | packed |\n|---|---|---|---|---|\n",
    "reward models": "| model type | kind | scores |\n|---|---|---|\n",
    "refused": "| model type | kind | message |\n|---|---|---|\n",
}


@cache
def page():
    """The page's rows, by table and model type."""
    text = PAGE.read_text(encoding="utf-8")
    found = {}
    for table, heading in HEADINGS.items():
        rows = text.partition(heading)[2].partition("\n\n")[0].splitlines()
        cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
        found[table] = {row[0].strip("`"): row[1:] for row in cells}
    return found


def test_the_page_has_every_architecture():
    """In the table of those that work, or of those that are refused with the reason."""
    for table, (architectures, _) in TABLES.items():
        expected = {name: one.kind for name, one in architectures.items() if not one.refused}
        assert {name: cells[0] for name, cells in page()[table].items()} == expected
    refused = {name: one for name, one in POLICIES.items() if one.refused}
    assert page()["refused"].keys() == refused.keys()
    assert all(one.refused in page()["refused"][name][1] for name, one in refused.items())
    assert len({*page()["policies"], *page()["reward models"]}) >= 45


def test_every_number_on_the_page_is_within_the_limit():
    numbers = [float(cells[1]) for table in TABLES for cells in page()[table].values()]
    assert max(numbers) <= LIMIT


def test_no_check_is_needed_for_those_that_were_measured_and_have_the_cache_in_place():
    in_place = {name for name, cells in page()["policies"].items() if cells[2] == "in place"}
    assert in_place - {name for name, one in POLICIES.items() if one.text is not None} == PROVEN


def summary():
    """The table of policies without its numbers, model types of one kind in a row; then the reward models."""
    grouped = {}
    for name, (kind, _, cache_is, packed) in page()["policies"].items():
        grouped.setdefault((kind, cache_is, packed), []).append(f"`{name}`")
    lines = ["| kind | cache | packed | model types |", "|---|---|---|---|"]
    lines += [
        f"| {kind} | {cache_is} | {packed} | {', '.join(names)} |"
        for (kind, cache_is, packed), names in grouped.items()
    ]
    lines += ["", "| reward models | model types |", "|---|---|"]
    kinds = {}
    for name, (kind, _) in page()["reward models"].items():
        kinds.setdefault(kind, []).append(f"`{name}`")
    return "\n".join([*lines, *(f"| {kind} | {', '.join(names)} |" for kind, names in kinds.items())])


TABLE_OF_SUMMARY = re.compile(r"(<!-- summary -->\n).*?(\n<!-- /summary -->)", re.DOTALL)


def test_the_summary_is_that_of_the_rows():
    found = TABLE_OF_SUMMARY.search(SUMMARY.read_text(encoding="utf-8"))
    assert found is not None
    assert found.group() == f"<!-- summary -->\n{summary()}\n<!-- /summary -->"


def check(table, name):
    """A row of the page against the code."""
    architectures, measure = TABLES[table]
    found = measure(name)
    if architectures[name].refused:
        assert architectures[name].refused in found
        without_numbers = [re.sub(r"[\d.]+", "N", text) for text in (found, page()["refused"][name][1])]
        assert without_numbers[0] == without_numbers[1]
    else:
        assert list(found[1:]) == page()[table][name][2:], found


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, names in ORDINARY.items() for name in names])
def test_one_of_each_kind(table, name):
    check(table, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("table", "name"), ROWS)
def test_a_row_of_the_page(table, name):
    check(table, name)


def write_page():
    """Write the tables into the page; what stands around them stays."""
    rows = dict.fromkeys(HEADINGS, "")
    for table, name in ROWS:
        architectures, measure = TABLES[table]
        print(name, file=sys.stderr)
        found = measure(name)
        cells = (found,) if architectures[name].refused else found
        rows["refused" if architectures[name].refused else table] += (
            f"| `{name}` | {architectures[name].kind} | {' | '.join(cells)} |\n"
        )
    text = PAGE.read_text(encoding="utf-8")
    for table, heading in HEADINGS.items():
        before, _, after = text.partition(heading)
        rest = itertools.dropwhile(lambda line: line.startswith("|"), after.splitlines(keepends=True))
        text = before + heading + rows[table] + "".join(rest)
    PAGE.write_text(text, encoding="utf-8")
    page.cache_clear()
    text = SUMMARY.read_text(encoding="utf-8")
    text = TABLE_OF_SUMMARY.sub(lambda found: found[1] + summary() + found[2], text)
    SUMMARY.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_page()
