"""What scripts reach of `PPOTrainer` besides `step`: sampling, the dataloader, logging, saving; and what is refused."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import AutoTokenizer, HfArgumentParser

import heedful
from heedful.compat import trl
from heedful.compat.trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer, set_seed
from heedful.errors import ConfigError, RewardError
from refusals import refused

SMALL = {"batch_size": 2, "mini_batch_size": 1, "ppo_epochs": 1}
GREEDY = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
LORA = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, lora_dropout=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("compat") / "gpt2"
    heedful.make_tiny_model("gpt2", path, hidden_size=16, initializer_range=0.3)
    return str(path)


@pytest.fixture
def make(folder):
    def make_trainer(*, settings=SMALL, peft_config=None, **kwargs):
        torch.manual_seed(0)
        model = AutoModelForCausalLMWithValueHead.from_pretrained(folder, peft_config=peft_config)
        tokenizer = kwargs.pop("tokenizer", AutoTokenizer.from_pretrained(folder))
        return PPOTrainer(PPOConfig(**settings), model, tokenizer=tokenizer, **kwargs)

    return make_trainer


def tokens(*texts):
    """Token ids, none of a special token."""
    return [torch.tensor([byte + 8 for byte in text.encode()]) for text in texts]


def test_responses_of_a_list_are_those_of_its_queries_alone(make):
    """Padding on the left changes nothing, and the tokenizer's own side stays."""
    trainer, queries = make(), tokens("你好", "今天天气怎么样", "hi")
    alone = [trainer.generate(query, return_prompt=False, **GREEDY)[0] for query in queries]
    together = trainer.generate(queries, batch_size=2, return_prompt=False, **GREEDY)
    assert [row.tolist() for row in together] == [row.tolist() for row in alone]
    assert trainer.tokenizer.padding_side == "right"
    whole = trainer.generate(queries, **GREEDY)
    assert [row.tolist() for row in whole] == [[*q.tolist(), *r.tolist()] for q, r in zip(queries, alone, strict=True)]
    assert trainer.generate(queries[0], **GREEDY)[0].tolist() == whole[0].tolist()


def test_a_response_ends_at_its_own_first_end_of_text(make):
    """The query's end-of-text tokens, such as a first one, end nothing."""
    trainer = make()
    end = trainer.tokenizer.eos_token_id
    query = torch.tensor([end, 20, 21])
    first = int(trainer.generate(query, return_prompt=False, **GREEDY)[0, 0])
    (uncut,) = trainer.generate([query], **GREEDY)
    assert len(uncut) == 8
    trainer.tokenizer.eos_token = trainer.tokenizer.convert_ids_to_tokens(first)
    assert trainer.generate([query], **GREEDY)[0].tolist() == [end, 20, 21, first]
    assert trainer.generate([query], return_prompt=False, **GREEDY)[0].tolist() == [first]


def test_a_length_sampler_is_asked_for_each_batch(make):
    lengths = iter([2, 4, 3])
    settings = {"do_sample": False, "eos_token_id": 100_000, "length_sampler": lambda: next(lengths)}
    trainer = make()
    trainer.tokenizer.eos_token = "<|cls|>"
    rows = trainer.generate(tokens("一", "二", "三"), batch_size=2, return_prompt=False, **settings)
    assert [len(row) for row in rows] == [2, 2, 4]
    assert trainer.generate(tokens("一")[0], return_prompt=False, **settings).shape == (1, 3)
    set_seed(3)
    drawn = {LengthSampler(2, 5)() for _ in range(50)}
    assert drawn == {2, 3, 4}


def test_responses_of_the_reference_are_without_the_adapter(make, folder):
    trainer, queries = make(peft_config=LORA), tokens("今天", "hello")
    policy, reference = trainer.generate(queries, generate_ref_response=True, **GREEDY)
    base = make().generate(queries, **GREEDY)
    assert [row.tolist() for row in reference] == [row.tolist() for row in base]
    assert [row.tolist() for row in policy] != [row.tolist() for row in base]
    one, ref_one = trainer.generate(queries[0], generate_ref_response=True, **GREEDY)
    assert one[0].tolist() == policy[0].tolist()
    assert ref_one[0].tolist() == reference[0].tolist()


def test_a_reference_that_is_passed_is_the_one_of_an_adapter_too(make, folder):
    other = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    nn.init.normal_(other.pretrained_model.transformer.wte.weight)
    kl = [make(peft_config=LORA, ref_model=one).step(*batch())["objective/kl"] for one in (None, other)]
    assert abs(kl[0] - kl[1]) > 0.1
    with pytest.warns(UserWarning, match="num_shared_layers has no effect"):
        make(ref_model=other, num_shared_layers=1)


def test_sampling_has_no_dropout_before_and_after_a_step(make):
    """TRL leaves the model in training mode after its first step."""
    trainer, queries = make(peft_config=LORA), tokens("今天", "hello")
    trainer.model.train()
    for _ in range(2):
        rows = [[row.tolist() for row in trainer.generate(queries, **GREEDY)] for _ in range(3)]
        assert rows[0] == rows[1] == rows[2]
        trainer.step(queries, tokens("很好", "ok"), [torch.tensor(1.0), torch.tensor(0.0)])


def test_the_dataloader_shuffles_whole_batches_of_the_columns_in_use(make):
    rows = {"query": [f"第{i}个" for i in range(5)], "input_ids": [[i] for i in range(5)], "stars": list(range(5))}
    dataset = Dataset.from_dict(rows).with_format("torch")
    trainer = make(dataset=dataset, data_collator=lambda rows: {key: [row[key] for row in rows] for key in rows[0]})
    epochs = [[int(ids[0]) for batch in trainer.dataloader for ids in batch["input_ids"]] for _ in range(8)]
    assert all(len(epoch) == 4 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert {*next(iter(trainer.dataloader))} == {"query", "input_ids"}
    settings = SMALL | {"remove_unused_columns": False}
    assert "stars" in next(iter(make(settings=settings, dataset=dataset, data_collator=list).dataloader))[0]
    assert make().dataloader is None


def test_the_names_that_scripts_read(make):
    trainer = make()
    accelerator = trainer.accelerator
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process
    assert accelerator.unwrap_model(trainer.model) is trainer.model
    assert trainer.current_device == accelerator.device
    assert not trainer.is_distributed
    assert trainer.config.global_batch_size == trainer.config.batch_size
    assert trainer.kl_ctl.value == 0.2
    trainer.kl_ctl.value = 0.5
    assert trainer.step(*batch())["objective/kl_coef"] == 0.5
    assert trainer.optimizer.param_groups[0]["lr"] == PPOConfig.learning_rate
    assert trainer.ref_model.pretrained_model is not trainer.model.pretrained_model


def test_save_pretrained_writes_the_tokenizer_too(make, tmp_path):
    trainer = make()
    trainer.save_pretrained(tmp_path / "保存")
    again = AutoTokenizer.from_pretrained(tmp_path / "保存")
    assert again("今天")["input_ids"] == trainer.tokenizer("今天")["input_ids"]


# Settings ---------------------------------------------------------------------------------------------------------------


OF_TRL = {
    "seed": 0, "log_with": None, "task_name": None, "model_name": "gpt2", "query_dataset": "stanfordnlp/imdb",
    "reward_model": "sentiment-analysis:lvwerra/distilbert-imdb", "remove_unused_columns": True, "tracker_kwargs": {},
    "accelerator_kwargs": {}, "project_kwargs": {}, "tracker_project_name": "trl", "push_to_hub_if_best_kwargs": {},
    "steps": 20000, "learning_rate": 1.41e-5, "adap_kl_ctrl": True, "init_kl_coef": 0.2, "kl_penalty": "kl",
    "target": 6.0, "horizon": 10000.0, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2, "cliprange_value": 0.2,
    "vf_coef": 0.1, "batch_size": 128, "forward_batch_size": None, "mini_batch_size": 128,
    "gradient_accumulation_steps": 1, "world_size": None, "ppo_epochs": 4, "max_grad_norm": None,
    "optimize_cuda_cache": None, "optimize_device_cache": False, "early_stopping": False, "target_kl": 1.0,
    "compare_steps": 1, "ratio_threshold": 10.0, "use_score_scaling": False, "use_score_norm": False, "score_clip": None,
    "whiten_rewards": False, "gradient_checkpointing": False, "is_encoder_decoder": None, "is_peft_model": None,
    "backward_batch_size": 128, "global_backward_batch_size": None, "global_batch_size": None, "dataset_num_proc": None,
}  # fmt: skip
"""TRL 0.11.4's, read from ``dataclasses.asdict(trl.PPOConfig())``."""


def test_the_settings_and_defaults_are_those_of_trl():
    ours = dataclasses.asdict(PPOConfig())
    assert ours.pop("exp_name")
    assert ours == OF_TRL


def test_flags_make_settings():
    (config,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(
        ["--batch_size", "8", "--mini_batch_size", "2", "--kl_penalty", "full", "--early_stopping", "--steps", "20"]
    )
    assert (config.batch_size, config.kl_penalty, config.early_stopping) == (8, "full", True)
    assert config.total_ppo_epochs == 3


def test_older_names_set_the_newer_ones():
    config = PPOConfig(batch_size=8, forward_batch_size=4, optimize_cuda_cache=True)
    assert (config.mini_batch_size, config.optimize_device_cache) == (4, True)
    flat = PPOConfig(tracker_kwargs={"wandb": {"name": "一"}}).to_dict()
    assert flat["tracker_kwargs/wandb/name"] == "一"
    json.dumps(flat)


# Refusals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"batch_size": 6}, ["batch_size is 6", "128 * 1 = 128", "before TRL 0.7 it was 1"]),
        ({"mini_batch_size": 0}, ["mini_batch_size is 0", "at least 1"]),
        ({"kl_penalty": "k3"}, ["kl_penalty is 'k3'", "'kl', 'abs', 'mse' or 'full'"]),
        ({"target": 0.0}, ["target is 0.0", "adap_kl_ctrl=False"]),
        ({"log_with": "comet_ml"}, ["log_with is 'comet_ml'", "'tensorboard', 'wandb' or None"]),
        ({"log_with": "tensorboard"}, ["no folder to write to", "project_kwargs={'logging_dir': 'logs'}"]),
        ({"push_to_hub_if_best_kwargs": {"repo_id": "me/模型"}}, ["not supported", "ppo_trainer.push_to_hub(NAME)"]),
        ({"accelerator_kwargs": {"logging_dir": "x"}}, ["accelerator_kwargs has 'logging_dir'", "mixed_precision"]),
        (
            {"accelerator_kwargs": {"gradient_accumulation_steps": 2}},
            ["use PPOConfig's own gradient_accumulation_steps"],
        ),
        ({"project_kwargs": {"folder": "x"}}, ["project_kwargs has 'folder'", "logging_dir"]),
    ],
)
def test_settings_that_are_refused(settings, parts):
    with refused(ConfigError, *parts):
        PPOConfig(**settings)


def test_a_tracker_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with refused(ConfigError, "'wandb', which is not installed", 'pip install "heedful[wandb]"'):
        PPOConfig(log_with="wandb")


def test_arguments_of_the_trainer_that_are_refused(make, folder):
    unpadded = copy.copy(AutoTokenizer.from_pretrained(folder))
    unpadded.pad_token = None
    words = Dataset.from_dict({"文本": ["一", "二"]})
    for kwargs, parts in (
        ({"tokenizer": None}, ["tokenizer is a NoneType", "AutoTokenizer.from_pretrained(MODEL)"]),
        ({"tokenizer": unpadded}, ["no pad token", "tokenizer.pad_token = tokenizer.eos_token"]),
        ({"ref_model": nn.Linear(1, 1)}, ["ref_model is a Linear", "from_pretrained(ref_model)"]),
        ({"dataset": ["一", "二"]}, ["dataset is a list", "datasets.Dataset or a torch Dataset"]),
        ({"dataset": words.to_iterable_dataset()}, ["dataset is a IterableDataset", "a torch Dataset with a length"]),
        ({"dataset": words}, ["drops all columns of the dataset: 文本", "remove_unused_columns=False"]),
        ({"dataset": words.rename_column("文本", "query").select([0])}, ["dataset has 1 rows", "batch_size is 2"]),
        ({"settings": SMALL | {"batch_size": 1, "use_score_scaling": True}}, ["batch_size 1", "deviation"]),
    ):
        with refused(ConfigError, *parts):
            make(**kwargs)
    with refused(ConfigError, "config is a dict", "PPOConfig"):
        PPOTrainer(SMALL, None)
    with refused(ConfigError, "model is a GPT2LMHeadModel", "AutoModelForCausalLMWithValueHead.from_pretrained(model)"):
        PPOTrainer(PPOConfig(**SMALL), transformers.AutoModelForCausalLM.from_pretrained(folder))


def batch():
    return tokens("今天", "hi"), tokens("很好", "ok"), [torch.tensor(1.0), torch.tensor(-1.0)]


def test_batches_that_are_refused(make):
    trainer = make()
    before = [weight.clone() for weight in trainer.model.parameters()]
    queries, responses, scores = batch()
    masks = [torch.ones_like(response) for response in responses]
    for changed, kind, parts in (
        ((queries[:1], responses, scores), ConfigError, ["queries has 1 entries", "batch_size is 2"]),
        ((torch.stack(scores), responses, scores), ConfigError, ["queries is a Tensor", "list of tensors"]),
        ((queries, ["很好", "ok"], scores), ConfigError, ["responses is a list", "list of tensors"]),
        ((queries, responses, [1.0, 2.0]), ConfigError, ["scores is a list", "list of tensors"]),
        (
            (queries, [responses[0], responses[1][:0]], scores),
            ConfigError,
            ["responses[1] has shape [0]", "at least one"],
        ),
        ((queries, [responses[0].unsqueeze(0), responses[1]], scores), ConfigError, ["responses[0] has shape [1, 6]"]),
        ((queries, responses, [scores[0], torch.ones(2)]), ConfigError, ["scores[1] has shape [2]", "one number"]),
        ((queries, responses, [scores[0], torch.tensor(np.nan)]), RewardError, ["scores[1] is nan", "finite"]),
        (
            (queries, responses, scores, [masks[0], masks[0]]),
            ConfigError,
            ["response_masks[1]", "shape of its response, [2]"],
        ),
        ((queries, responses, scores, [masks[0], 0 * masks[1]]), ConfigError, ["response_masks[1]", "0 ones"]),
    ):
        with refused(kind, *parts):
            trainer.step(*changed)
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), before, strict=True))
    with refused(ConfigError, "query_tensor has shape [1, 3]", "list(query_tensor)"):
        trainer.generate(torch.ones(1, 3, dtype=torch.long), **GREEDY)


def test_other_parts_of_trl_are_refused_by_name():
    with refused(ConfigError, "TextEnvironment is not supported", "heedful ppo --environment", "response_masks"):
        trl.TextEnvironment()
    for name, instead in (("SFTTrainer", "heedful.train_sft"), ("DPOConfig", "heedful.train_dpo")):
        with refused(ConfigError, f"no {name}", instead):
            getattr(trl, name)
    for instead in trl.INSTEAD.values():
        assert hasattr(heedful, instead.split()[0].removeprefix("heedful."))
    assert not hasattr(trl, "什么")
