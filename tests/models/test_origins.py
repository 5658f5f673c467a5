"""Models of TRL, LLaMA-Factory and OpenRLHF: folders as each of them writes them, read as each of them reads them.

The expected numbers are those of plain transformers and a head by hand. ``benchmarks/old_ppo/origins.py`` compares with the
libraries themselves.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from heedful import CheckpointError, Policy
from heedful.configs.tools import MergeConfig
from heedful.models import load_policy, load_reward_model, load_tokenizer, load_value_model
from heedful.models.load import load_causal_lm
from heedful.models.merge import merge_model
from heedful.models.save import save_reward_model
from heedful.models.source import half_of_file, resolve
from heedful.rewards.models import load_model_reward
from jsonl import read_metrics, write_jsonl

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
QUESTION, ANSWER = "一加一等于几？", "等于二。"


@pytest.fixture(scope="module")
def lm(tiny, tmp_path_factory):
    """The folder of a causal language model whose embeddings are not its output head."""
    folder = tmp_path_factory.mktemp("语言模型") / "模型"
    shutil.copytree(tiny("qwen3"), folder)
    edit(folder / "config.json", tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_pretrained(folder)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def head():
    """Of TRL: weight and bias."""
    generator = torch.Generator().manual_seed(7)
    return {
        "v_head.summary.weight": 0.3 * torch.randn(1, 32, generator=generator),
        "v_head.summary.bias": torch.tensor([0.75]),
    }


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


def copied(lm, folder, *, tensors=(), drop=()):
    """A copy of a language model, with more tensors among its weights and without some."""
    shutil.copytree(lm, folder)
    weights = load_file(folder / "model.safetensors") | dict(tensors)
    weights = {name: x for name, x in weights.items() if not name.startswith(tuple(drop))}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def in_pickles(folder, *, shards=1):
    """The same folder with its weights in torch's format, as before safetensors."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return folder
    names = sorted(weights)
    files = {
        name: f"pytorch_model-{1 + i * shards // len(names):05}-of-{shards:05}.bin" for i, name in enumerate(names)
    }
    for file in set(files.values()):
        torch.save({name: weights[name] for name in names if files[name] == file}, folder / file)
    size = sum(x.nbytes for x in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), "utf-8")
    return folder


def lora(lm, folder, **settings):
    """Adapters with random numbers as PEFT saves them; returns the merged model."""
    options = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]} | settings
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(lm), LoraConfig(r=2, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    edit(folder / "adapter_config.json", base_model_name_or_path=str(lm))
    return model.merge_and_unload()


def trl_adapters(lm, folder, head):
    """As AutoModelForCausalLMWithValueHead.save_pretrained writes a model of PEFT."""
    model = lora(lm, folder)
    torch.save(head, folder / "pytorch_model.bin")
    return model


def openrlhf(lm, folder, weight, *, kind="RewardModel", prefix="score", **config):
    """As get_llm_for_sequence_regression's classes are saved: a trunk with a head, without the language model's."""
    copied(lm, folder, tensors={f"{prefix}.weight": weight}, drop=["lm_head"])
    edit(folder / "config.json", architectures=[kind], normalize_reward=False, **config)
    return folder


def states(model, ids):
    return model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]


@torch.no_grad()
def values_of(model, ids, weight, bias=0.0):
    """A head's value at each token."""
    return states(model, ids) @ weight[0] + bias


def plain(lm):
    return AutoModelForCausalLM.from_pretrained(lm)


IDS = list("你好，世界！".encode())
MASK = torch.tensor([[False] * 5 + [True] * (len(IDS) - 6)])


@torch.no_grad()
def critic_values(network):
    """Values of the states before response tokens, the last tokens of `IDS`."""
    ids = torch.tensor([IDS])
    network.eval()
    outputs = network(ids, torch.ones_like(ids, dtype=torch.bool), MASK)
    return (outputs if isinstance(outputs, torch.Tensor) else outputs.values)[MASK]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert float(b.std()) > 0.05  # a head that says nothing would pass


@pytest.mark.parametrize("form", ["safetensors", "bin", "shards"])
def test_trls_value_head_is_the_start_of_a_shared_critic_and_is_a_separate_one(lm, head, tmp_path, form):
    folder = copied(lm, tmp_path / "策略", tensors=head)
    if form != "safetensors":
        in_pickles(folder, shards=1 if form == "bin" else 3)
    expected = values_of(plain(lm), IDS, head["v_head.summary.weight"], 0.75)[:-1][MASK[0]]
    policy = load_policy(str(folder), with_value_head=True, **CPU)
    close(critic_values(policy), expected)
    close(critic_values(load_value_model(str(folder), **CPU)), expected)
    assert load_policy(str(folder), **CPU).value_head is None


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_trls_adapters_have_the_value_head_beside_them(lm, head, tmp_path, weights):
    folder = tmp_path / "适配器"
    model = trl_adapters(lm, folder, head)
    if weights == "adapter_model.bin":
        torch.save(load_file(folder / "adapter_model.safetensors"), folder / weights)
        (folder / "adapter_model.safetensors").unlink()
    expected = values_of(model, IDS, head["v_head.summary.weight"], 0.75)[:-1][MASK[0]]
    close(critic_values(load_policy(str(folder), with_value_head=True, **CPU)), expected)
    close(critic_values(load_value_model(str(folder), **CPU)), expected)


def test_a_head_of_the_base_of_adapters_is_not_theirs(lm, head, tmp_path):
    base = copied(lm, tmp_path / "底座", tensors=head)
    lora(base, tmp_path / "适配器")
    assert not load_value_model(str(tmp_path / "适配器"), **CPU).value_head.weight.any()


def test_trls_head_in_float32_leaves_the_model_in_half_precision(lm, head, tmp_path):
    folder = copied(lm, tmp_path / "策略")
    half = {name: x.bfloat16() for name, x in load_file(folder / "model.safetensors").items()}
    save_file(half | head, folder / "model.safetensors", {"format": "pt"})
    assert half_of_file(resolve(str(folder))) == torch.bfloat16


def test_a_policy_elsewhere_has_no_trace_of_trls_head(lm, head, tmp_path):
    folder = copied(lm, tmp_path / "策略", tensors=head)
    policy = Policy.from_pretrained(folder)
    policy.save(tmp_path / "再存")
    assert not any(
        "head" in name for name in load_file(tmp_path / "再存" / "model.safetensors") if "lm_head" not in name
    )
    assert not (tmp_path / "再存" / "value_head").exists()


def factory(lm, folder, head, *, adapters, file):
    """As LLaMA-Factory's fix_valuehead_checkpoint leaves a folder: the head in a file of its own."""
    model = lora(lm, folder) if adapters else plain(copied(lm, folder))
    if adapters:
        load_tokenizer(str(lm)).save_pretrained(folder)
    if file == "value_head.bin":
        torch.save(head, folder / file)
    else:
        save_file(head, folder / file, {"format": "pt"})
    return model


TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def talker(lm, tmp_path_factory):
    """A language model whose template writes a line break after the end of the turn, and whose padding is its EOS."""
    folder = tmp_path_factory.mktemp("对话") / "模型"
    shutil.copytree(lm, folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token = tokenizer.pad_token = "<|end|>"
    tokenizer.save_pretrained(folder)
    edit(folder / "config.json", pad_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id)
    return folder


def conversation(folder):
    """The ids of the question and its answer as the template renders them."""
    tokenizer = load_tokenizer(str(folder))
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids


def score(folder, *, truncated=False):
    reward = load_model_reward(str(folder), **CPU)
    answer = [{"role": "assistant", "content": ANSWER}]
    return reward([[{"role": "user", "content": QUESTION}]], [answer], [truncated])[0]


def exactly(expected):
    return pytest.approx(float(expected), rel=0, abs=1e-5)


@pytest.mark.parametrize("file", ["value_head.safetensors", "value_head.bin"])
@pytest.mark.parametrize("adapters", [False, True])
def test_llamafactorys_score_is_the_value_at_the_last_token_of_a_response(talker, head, tmp_path, adapters, file):
    """Its PPO scores the policy's own tokens: with the token that ends the turn, but without what the template adds."""
    folder = tmp_path / "奖励模型"
    model = factory(talker, folder, head, adapters=adapters, file=file)
    values = values_of(model, conversation(talker), head["v_head.summary.weight"], 0.75)
    assert abs(values[-1] - values[-2]) > 0.01 < abs(values[-2] - values[-3])
    assert score(folder) == exactly(values[-2])
    assert score(folder, truncated=True) == exactly(values[-3])


def test_llamafactorys_head_of_before_version_0_2(talker, head, tmp_path):
    folder = tmp_path / "奖励模型"
    model = factory(talker, folder, head, adapters=True, file="value_head.bin")
    torch.save({name.removeprefix("v_head."): x for name, x in head.items()}, folder / "value_head.bin")
    assert score(folder) == exactly(values_of(model, conversation(talker), head["v_head.summary.weight"], 0.75)[-2])


def test_llamafactorys_score_after_all_that_the_template_adds_if_a_file_says_so(talker, head, tmp_path):
    model = factory(talker, tmp_path / "奖励模型", head, adapters=False, file="value_head.safetensors")
    (tmp_path / "奖励模型" / "heedful.json").write_text('{"reads": "template"}', "utf-8")
    values = values_of(model, conversation(talker), head["v_head.summary.weight"], 0.75)
    assert score(tmp_path / "奖励模型") == exactly(values[-1])


@pytest.mark.parametrize("adapters", [False, True])
def test_a_reward_model_goes_on_from_llamafactorys_head_and_is_saved_with_it(talker, head, tmp_path, adapters):
    folder, again = tmp_path / "奖励模型", tmp_path / "再存"
    factory(talker, folder, head, adapters=adapters, file="value_head.safetensors")
    tokenizer = load_tokenizer(str(folder))
    model = load_reward_model(str(folder), tokenizer, seed=3, **CPU)
    torch.testing.assert_close(model.classifier.score.weight, head["v_head.summary.weight"], rtol=0, atol=0)
    save_reward_model(model, tokenizer, again)
    assert score(again) == exactly(score(folder))


def test_a_value_model_starts_from_llamafactorys_reward_model(talker, head, tmp_path):
    model = factory(talker, tmp_path / "奖励模型", head, adapters=True, file="value_head.safetensors")
    expected = values_of(model, IDS, head["v_head.summary.weight"], 0.75)[:-1][MASK[0]]
    close(critic_values(load_value_model(str(tmp_path / "奖励模型"), **CPU)), expected)


NORMAL = {"mean": 0.4, "std": 2.5}


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("prefix", ["score", "value_head"])
def test_openrlhfs_score_is_normalised_if_its_configuration_says_so(talker, head, tmp_path, prefix, normalised):
    weight = head["v_head.summary.weight"]
    folder = openrlhf(talker, tmp_path / "奖励模型", weight, prefix=prefix, **NORMAL)
    if normalised:
        edit(folder / "config.json", normalize_reward=True)
    raw = values_of(plain(talker), conversation(talker), weight)
    assert score(folder) == exactly((raw[-2] - 0.4) / 2.5 if normalised else raw[-2])


@pytest.mark.parametrize(("kind", "prefix"), [("CriticModel", "score"), ("RewardModel", "value_head")])
def test_openrlhfs_critic_is_a_value_model(talker, head, tmp_path, kind, prefix):
    weight = head["v_head.summary.weight"]
    folder = openrlhf(talker, tmp_path / "评论家", weight, kind=kind, prefix=prefix, **NORMAL)
    edit(folder / "config.json", normalize_reward=True, value_head_prefix=prefix)
    expected = (values_of(plain(talker), IDS, weight)[:-1][MASK[0]] - 0.4) / 2.5
    close(critic_values(load_value_model(str(folder), **CPU)), expected)


def openrlhf_adapters(lm, folder, extra, kind="RewardModel", **config):
    """As OpenRLHF saves a model with adapters: they name its class, and its configuration is beside them."""
    model = lora(lm, folder, task_type=None)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(
        weights | {f"base_model.model.{name}": x for name, x in extra.items()}, folder / "adapter_model.safetensors"
    )
    mapping = {"base_model_class": kind, "parent_library": "openrlhf.models.model"}
    edit(folder / "adapter_config.json", auto_mapping=mapping)
    shutil.copy(Path(lm) / "config.json", folder)
    edit(folder / "config.json", normalize_reward=False, **config)
    load_tokenizer(str(lm)).save_pretrained(folder)
    return model


@pytest.mark.parametrize("prefix", ["score", "value_head"])
def test_openrlhfs_adapters_with_a_head_among_them(talker, head, tmp_path, prefix):
    weight, folder = head["v_head.summary.weight"], tmp_path / "适配器"
    model = openrlhf_adapters(talker, folder, {f"{prefix}.weight": weight}, **NORMAL)
    edit(folder / "config.json", normalize_reward=True)
    assert score(folder) == exactly((values_of(model, conversation(talker), weight)[-2] - 0.4) / 2.5)
    expected = (values_of(model, IDS, weight)[:-1][MASK[0]] - 0.4) / 2.5
    close(critic_values(load_value_model(str(folder), **CPU)), expected)


def test_openrlhfs_adapters_on_one_of_its_reward_models(talker, head, tmp_path):
    weight = head["v_head.summary.weight"]
    base = openrlhf(talker, tmp_path / "底座", weight, prefix="value_head")
    model = openrlhf_adapters(talker, tmp_path / "适配器", {})
    edit(tmp_path / "适配器" / "adapter_config.json", base_model_name_or_path=str(base))
    assert score(tmp_path / "适配器") == exactly(values_of(model, conversation(talker), weight)[-2])


# What cannot be told, or is something else ----------------------------------------------------------------------------------


def reward(folder):
    load_model_reward(str(folder), **CPU)


def critic(folder):
    load_value_model(str(folder), **CPU)


def policy(folder):
    load_policy(str(folder), with_value_head=True, **CPU)


def refused(read, folder, *texts):
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    for text in (folder.name, *texts):
        assert text in str(caught.value)


def test_a_policy_of_trl_is_not_a_reward_model(lm, head, tmp_path):
    folder = copied(lm, tmp_path / "策略", tensors=head)
    refused(reward, folder, "the critic of a policy, not a reward model", "value_head.safetensors")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensors.pop(name) for name in head}, folder / "value_head.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    reward(folder)  # the way that the message names


def test_a_reward_model_starts_from_a_policy_of_trl_with_a_new_head(lm, head, tmp_path):
    folder = str(copied(lm, tmp_path / "策略", tensors=head))
    model = load_reward_model(folder, load_tokenizer(folder), seed=3, **CPU)
    assert model.offset == 0
    assert not torch.equal(model.classifier.score.weight, head["v_head.summary.weight"])


@pytest.mark.parametrize("read", [policy, critic, reward])
def test_a_value_head_of_another_form_is_refused(lm, tmp_path, read):
    """trlX's has several layers, for example."""
    folder = copied(lm, tmp_path / "策略", tensors={"v_head.0.weight": torch.ones(64, 32)})
    refused(read, folder, "v_head.0.weight", "v_head.summary.weight and v_head.summary.bias")
    load_policy(str(folder), **CPU)  # without the head there is nothing to ask


def test_two_value_heads_are_refused(lm, head, tmp_path):
    folder = copied(lm, tmp_path / "策略", tensors=head)
    save_file(head, folder / "value_head.safetensors")
    refused(policy, folder, "2 value heads", "LLaMA-Factory's", "TRL's")


@pytest.mark.parametrize("read", [policy, critic, reward])
def test_a_head_of_another_width_is_refused(lm, head, tmp_path, read):
    folder = copied(lm, tmp_path / "策略")
    save_file(head | {"v_head.summary.weight": torch.ones(1, 48)}, folder / "value_head.safetensors")
    refused(read, folder, "[1, 48]", "[1, 32]")


@pytest.mark.parametrize("read", [policy, critic, reward])
def test_a_head_that_is_not_finite_is_refused(lm, head, tmp_path, read):
    folder = copied(lm, tmp_path / "策略")
    save_file(head | {"v_head.summary.weight": torch.full((1, 32), torch.nan)}, folder / "value_head.safetensors")
    refused(read, folder, "not finite")


def test_a_file_that_would_run_code_is_not_run(lm, tmp_path):
    folder = copied(lm, tmp_path / "策略")
    torch.save({"v_head.summary.weight": Path("木马")}, folder / "value_head.bin")
    refused(reward, folder, "cannot load a value head")


def test_openrlhfs_reward_models_do_not_generate(lm, head, tmp_path):
    folder = openrlhf(lm, tmp_path / "奖励模型", head["v_head.summary.weight"])
    edit(folder / "config.json", tie_word_embeddings=True)  # it then lacks no weight of a language model
    refused(
        lambda path: load_causal_lm(str(path)), folder, "a reward model of OpenRLHF (RewardModel)", "cannot generate"
    )
    openrlhf_adapters(lm, tmp_path / "适配器", {"score.weight": head["v_head.summary.weight"]})
    refused(
        lambda path: load_causal_lm(str(path)), tmp_path / "适配器", "a reward model of OpenRLHF", "cannot generate"
    )


def test_openrlhfs_critics_are_not_reward_models(lm, head, tmp_path):
    folder = openrlhf(lm, tmp_path / "评论家", head["v_head.summary.weight"], kind="CriticModel")
    refused(reward, folder, "a critic of OpenRLHF", "--value-model")


def test_openrlhfs_head_that_is_not_there_or_not_the_only_one_is_refused(lm, head, tmp_path):
    weight = head["v_head.summary.weight"]
    folder = openrlhf(lm, tmp_path / "奖励模型", weight, prefix="value_head")
    edit(folder / "config.json", value_head_prefix="reward_head")
    refused(reward, folder, "reward_head.weight", "none of them")
    folder = copied(folder, tmp_path / "两个头", tensors={"score.weight": weight})
    edit(folder / "config.json", value_head_prefix=None)
    refused(reward, folder, "score.weight and value_head.weight", "set value_head_prefix")
    folder = copied(folder, tmp_path / "有偏置", tensors={"score.bias": torch.ones(1)}, drop=["value_head"])
    refused(reward, folder, "score.bias and score.weight", "architectures")  # another library's class of this name


def test_openrlhfs_adapters_without_their_head_are_refused(lm, tmp_path):
    """It adapts all linear layers, its own head among them, and does not save what they adapt."""
    added = {f"score.lora_{x}.weight": torch.ones(shape) for x, shape in (("A", (2, 32)), ("B", (1, 2)))}
    openrlhf_adapters(lm, tmp_path / "适配器", added)
    refused(reward, tmp_path / "适配器", "adapt the head score too", "lora_combiner")
    openrlhf_adapters(lm, tmp_path / "没有头", {})
    refused(reward, tmp_path / "没有头", "score.weight or value_head.weight", "none of them")


@pytest.mark.parametrize("std", [0.0, -1.0, "二"])
def test_a_deviation_by_which_nothing_can_be_normalised_is_refused(lm, head, tmp_path, std):
    folder = openrlhf(lm, tmp_path / "奖励模型", head["v_head.summary.weight"], mean=0.0, std=std)
    reward(folder)
    edit(folder / "config.json", normalize_reward=True)
    refused(reward, folder, f"std {std!r}", "above 0")


# Commands -------------------------------------------------------------------------------------------------------------------


def test_merged_adapters_keep_their_head(talker, head, tmp_path):
    """TRL's as a critic's, LLaMA-Factory's as a reward model's, OpenRLHF's as part of the classifier."""
    trl_adapters(talker, tmp_path / "策略", head)
    merge_model(MergeConfig(adapter=str(tmp_path / "策略"), output=tmp_path / "合并的策略"))
    before, after = (load_policy(str(tmp_path / name), with_value_head=True, **CPU) for name in ("策略", "合并的策略"))
    close(critic_values(after), critic_values(before))
    factory(talker, tmp_path / "奖励", head, adapters=True, file="value_head.bin")
    merge_model(MergeConfig(adapter=str(tmp_path / "奖励"), output=tmp_path / "合并的奖励"))
    assert score(tmp_path / "合并的奖励") == exactly(score(tmp_path / "奖励"))
    openrlhf_adapters(talker, tmp_path / "另一个", {"value_head.weight": head["v_head.summary.weight"]})
    merge_model(MergeConfig(adapter=str(tmp_path / "另一个"), output=tmp_path / "合并的另一个"))
    assert score(tmp_path / "合并的另一个") == exactly(score(tmp_path / "另一个"))


@pytest.mark.exhaustive
def test_ppo_begins_with_a_policy_of_trl_and_a_reward_model_of_llamafactory(heedful, talker, head, tmp_path):
    """A new critic's first values are 0."""
    trained = copied(talker, tmp_path / "策略", tensors=head)
    factory(talker, tmp_path / "奖励", head, adapters=True, file="value_head.safetensors")
    data = write_jsonl(tmp_path / "提示.jsonl", [{"prompt": [{"role": "user", "content": QUESTION}]}] * 4)
    sizes = {"steps": 1, "rollout_batch_size": 4, "minibatch_size": 4, "max_new_tokens": 6, "eval_fraction": 0}
    for critic_of, more in (("shared", {}), ("separate", {"value_model": str(tmp_path / "奖励")})):
        settings = {"model": str(trained), "data": data, "rewards": f"model:{tmp_path / '奖励'}", "critic": critic_of}
        done = heedful("ppo", output=str(tmp_path / critic_of), device="cpu", **settings, **sizes, **more)
        assert done.status == 0, done.message
        (first,) = read_metrics(tmp_path / critic_of)
        assert abs(first["value/mean"]) > 0.1
        assert first["reward/score_std"] > 0
