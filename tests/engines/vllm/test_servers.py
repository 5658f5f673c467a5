"""Rows are drawn once each, by the trainer's weights, whatever becomes of a server; what does not fit is refused."""

import resource
import runpy
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraModel
from transformers import MixtralConfig, MixtralForCausalLM

from heedful import ConfigError
from heedful.core import token_logprobs
from heedful.engines.draw import filter_logits
from heedful.engines.teacher_forced import token_outputs
from heedful.errors import SamplerError
from heedful.models import Policy, load_causal_lm
from heedful.types import MicroBatch


def assert_same(found, expected):
    """The same rollouts, row for row."""
    assert torch.equal(found.batch.ids, expected.batch.ids)
    assert torch.equal(found.lengths, expected.lengths)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def forced(policy, rollouts, temperature=1.0):
    return token_outputs(policy, rollouts.batch, temperature=temperature, micro_batch=MicroBatch(64)).logprobs


@pytest.fixture
def one(server, connected, policy, draw):
    """``one(**changes)``: a server, the connection to it, and what it draws."""

    def of(faults=None, **changes):
        first = server()
        first.set_faults(**(faults or {}))
        servers = connected(first, policy=policy, **changes)
        return first, servers, draw(servers)

    return of


@pytest.fixture
def expected(server, connected, policy, draw):
    """What is drawn if nothing fails."""
    return draw(connected(server(), policy=policy))


def test_log_probs_are_those_of_the_policy(one, policy, prompts):
    """Not of the weights that the server began with; the prompts come back as they were, and every row has its response.

    Any version of vLLM draws that has what is asked of it.
    """
    _, servers, found = one({"version": "0.41.7", "lacks": ["/wake_up"]}, temperature=0.7)
    torch.testing.assert_close(found.logprobs, forced(policy, found, 0.7), rtol=1e-5, atol=1e-5)
    longest = found.batch.ids.shape[1] - found.batch.response_mask.shape[1]
    rows = zip(found.batch.ids[:, :longest], found.batch.attention_mask[:, :longest], strict=True)
    assert [ids[mask].tolist() for ids, mask in rows] == prompts
    assert found.lengths.tolist() == found.batch.response_mask.sum(dim=1).tolist()
    assert found.truncated.tolist() == [ids[-1] not in servers.stop_ids for ids in found.own_ids()]
    other = Policy(load_causal_lm(servers.config.model))
    assert float((forced(other, found, 0.7) - found.logprobs).abs().max()) > 0.1, "the test tells them apart"
    _, _, fixed = one(response_length="fixed")
    assert (set(fixed.lengths.tolist()), fixed.truncated.all()) == ({8}, True)


def test_weights_are_given_when_they_change_and_only_then(one, policy, draw):
    """A batch by an average of the weights, or a reference, gets those; the cache of prompts is emptied each time."""
    first, servers, found = one()
    seen = first.seen()
    assert (seen["loads"], seen["resets"]) == (1, 1)
    assert_same(draw(servers), found)
    assert first.seen()["loads"] == 0
    with torch.no_grad():
        next(policy.parameters()).add_(0.5)
    moved = draw(servers)
    seen = first.seen()
    assert (seen["loads"], seen["resets"]) == (1, 1)
    torch.testing.assert_close(moved.logprobs, forced(policy, moved), rtol=1e-5, atol=1e-5)
    assert [path.name for path in servers.folder.iterdir()] == ["v-000002"], "old weights are removed"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "faults",
    [
        {"fail": [0, 3, 4, 17]},
        {"busy": [0, 1, 2, 9]},
        {"hang_up": [2, 11]},
        {"fail": [1], "busy": [5], "hang_up": [20]},
        {"swap_after": 7},
    ],
    ids=str,
)
def test_a_row_that_fails_is_drawn_again_with_its_seed(faults, server, connected, policy, draw, expected):
    """Also if somebody else had the server load other weights meanwhile: what it drew since is not believed."""
    first = server()
    servers = connected(first, policy=policy)
    first.set_faults(**faults)
    assert_same(draw(servers), expected)
    assert servers.take_retries() >= 1
    assert servers.take_retries() == 0
    again = first.seen()
    assert len(again["completions"]) >= 24 + ("swap_after" not in faults), "some were asked again"
    if "swap_after" in faults:
        assert again["loads"] == 2, "the weights were given again"


def test_others_draw_the_rows_of_a_server_that_dies(server, connected, policy, draw, expected):
    """Several servers draw what one does. The one that comes back is given the weights before it draws again."""
    dying, other = server(1), server(0)
    servers = connected(dying, other, policy=policy, sampler_retry_minutes=5)
    assert_same(draw(servers), expected)
    seen = [len(one.seen()["completions"]) for one in (dying, other)]
    assert (sum(seen), min(seen) > 0) == (24, True), "they share the rows"
    dying.set_faults(die_after=1)  # on a busy machine it may be given no more than one row
    assert_same(draw(servers), expected)
    assert servers.take_retries() >= 1
    dying.come_back()
    dying.set_faults()
    with torch.no_grad():
        next(policy.parameters()).add_(0.5)
    loads = drawn = 0
    for _ in range(20):  # the other may be faster than the news
        found = draw(servers)
        torch.testing.assert_close(found.logprobs, forced(policy, found), rtol=1e-5, atol=1e-5)
        seen = dying.seen()
        loads, drawn = loads + seen["loads"], drawn + len(seen["completions"])
        if drawn:
            break
    assert drawn > 0
    assert loads == 1


@pytest.mark.exhaustive
def test_the_only_server_dies_and_comes_back(server, connected, policy, draw, expected):
    """With its first weights, which are not believed: the batch is drawn by those of the trainer."""
    dying = server(1)
    servers = connected(dying, policy=policy, sampler_retry_minutes=5)
    dying.set_faults(die_after=6)
    restart = threading.Timer(0.3, dying.come_back)
    restart.start()
    assert_same(draw(servers), expected)
    restart.join()
    assert {row["version"] for row in dying.seen()["completions"]} == {f"{servers.run}-1"}


def test_stale_weights_are_found_by_their_checksum(server, connected, policy, draw):
    """A server that says that it has loaded them, and has not."""
    first = server()
    servers = connected(first, policy=policy)
    first.set_faults(stale=True)
    with torch.no_grad():  # it may have those of the test before
        next(policy.parameters())[3, 5] += 1e-6
    with pytest.raises(
        SamplerError, match=rf"{first.name} has other weights than the trainer .*checksum [0-9a-f]{{16}}"
    ):
        draw(servers)


def test_weights_that_a_server_does_not_see(server, connected, policy, draw, tmp_path):
    first = server()
    servers = connected(first, policy=policy, sampler_folder=tmp_path / "geteilt")
    assert servers.folder.parent == tmp_path / "geteilt"
    first.set_faults(blind=True)
    with pytest.raises(
        SamplerError, match=r"could not load the weights in .*geteilt.*Cannot find any.*--sampler-folder"
    ):
        draw(servers)


def test_a_server_that_does_not_fit_is_refused_at_the_start(server, connected, policy):
    first = server()
    sleeps = {"sampler_sleep": True}
    for faults, changes, said in (
        ({"about": {"vocab_size": 7}}, {}, r"another model \(vocab_size 7\) than the policy \(vocab_size \d+\)"),
        ({"about": {"model_type": "llama", "num_layers": 3}}, {}, r"another model \(model_type llama, num_layers 3\)"),
        ({"about": {"max_model_len": 39}}, {}, "at most 39 tokens, but .* has 40; start it with --max-model-len 40"),
        ({"about": {"logprobs_mode": "raw_logprobs"}}, {}, "start it with --logprobs-mode processed_logprobs"),
        ({"about": {"quantization": "fp8"}}, {}, r"quantises its weights \(fp8\)"),
        ({"about": {"protocol": 0}}, {}, "another version of heedful's extension"),
        (
            {"version": "0.19.1", "lacks": ["/reset_prefix_cache"]},
            {},
            "is vLLM 0.19.1 without /reset_prefix_cache: was",
        ),
        ({"about": {"can_load": False}}, {}, r"is vLLM 0.32.0, which cannot load weights from a folder"),
        ({"lacks": ["/wake_up"]}, sleeps, r"is vLLM 0\.32\.0 without /wake_up"),
        ({"about": {"can_sleep": False}}, sleeps, "cannot sleep; start it with --sleep"),
    ):
        first.set_faults(**faults)
        with pytest.raises(SamplerError, match=said) as refused:
            connected(first, policy=policy, **changes)
        assert first.url in str(refused.value)
        assert refused.value.status == 2
    first.set_faults()  # vLLM is not installed where the tests run; what NCCL does needs two GPUs (docs/vllm.md)
    with pytest.raises(SamplerError, match="--sampler-weights nccl needs vLLM in the trainer's environment"):
        connected(first, policy=policy, sampler_weights="nccl")
    nobody = SimpleNamespace(name="vllm:http://127.0.0.1:9")
    with pytest.raises(SamplerError, match=r"vllm:http://127.0.0.1:9 cannot be reached: .*Is it running"):
        connected(nobody, policy=policy, sampler_retry_minutes=0.005)


def test_a_server_is_asked_for_as_many_rows_as_it_samples_together(server, connected, policy, draw):
    """vLLM's --max-num-seqs, by its own default 256 or 1,024; the limit on open files allows the connections."""
    first = server()
    first.set_faults(about={"max_num_seqs": 5}, waits_for=5)
    draw(connected(first, policy=policy))
    assert first.seen()["most"] == 5
    first.set_faults(about={"max_num_seqs": 1024}, waits_for=110)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        servers = connected(first, policy=policy)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    generator = torch.Generator().manual_seed(3)
    servers.finish(servers.begin(policy, [[5, 6]] * 110, generator), torch.device("cpu"))
    assert first.seen()["most"] == 110


def passed_on(self, *args, **kwargs):
    self.model_runner.reload_weights(*args, **kwargs)


@pytest.mark.parametrize(
    ("worker", "runner", "can"),
    [
        (passed_on, lambda weights_iterator=None, weights_path=None: None, True),
        (passed_on, lambda weights_iterator=None: None, False),
        (lambda self: None, lambda weights_path=None: None, False),
    ],
)
def test_a_worker_says_whether_it_can_load_from_a_folder(worker, runner, can, tiny):
    """As in vLLM 0.32, whose worker passes on what it is given, and in versions before."""
    made = runpy.run_path(Path(__file__).parents[2] / "policy_server.py")
    kind = type("Worker", (made["Worker"],), {"reload_weights": worker})
    found = kind(tiny("qwen3"), made["Faults"](), 256)
    found.model_runner.reload_weights = runner
    assert found.heedful_about()["can_load"] is can


def test_answers_that_cannot_be_are_no_responses(server, connected, policy, draw):
    first = server()
    servers = connected(first, policy=policy, sampler_retry_minutes=0.005)
    for garbage in (
        {"token_ids": [10**6]},
        {"token_ids": None},
        {"logprobs": None},
        {"logprobs": {"token_logprobs": [0.5]}},
        {"logprobs": {"token_logprobs": [None]}},
        {"token_ids": [], "logprobs": {"token_logprobs": []}},
        {"prompt_token_ids": [1, 2]},
    ):
        first.set_faults(garbage=garbage)
        with pytest.raises(SamplerError, match=f"{first.url} answered"):
            draw(servers)
    # vLLM drops its requests when it ends, or is told to: they are drawn again
    first.set_faults(garbage={"finish_reason": "abort"})
    with pytest.raises(SamplerError, match="a response ended with reason 'abort'"):
        draw(servers)


def test_with_filters_log_probs_are_of_what_was_drawn_from(one, policy):
    """Renormalised, so that importance weights are ratios to what drew."""
    _, _, found = one(temperature=0.5, importance="token-truncate", top_k=9, top_p=0.5)
    batch, time_ = found.batch, found.batch.response_mask.shape[1]
    positions = (batch.attention_mask.long().cumsum(dim=1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = policy.lm(batch.ids, attention_mask=batch.attention_mask.long(), position_ids=positions).logits
    logits = logits[:, -time_ - 1 : -1] / 0.5
    kept = filter_logits(logits.flatten(0, 1), top_k=9, top_p=0.5).view_as(logits)
    mask = batch.response_mask
    wanted = token_logprobs(kept, batch.ids[:, -time_:])
    torch.testing.assert_close(found.drawn_logprobs[mask], wanted[mask].float(), rtol=1e-4, atol=1e-4)
    assert float((wanted - token_logprobs(logits, batch.ids[:, -time_:]))[mask].abs().max()) > 0.1


def test_adapters_are_merged(server, connected, tiny, draw):
    """The server gets plain weights: W + alpha / rank * B A."""
    lm = load_causal_lm(tiny("qwen3"))
    LoraModel(lm, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False), "default")
    adapted = Policy(lm)
    found = draw(connected(server(), policy=adapted), adapted)
    torch.testing.assert_close(found.logprobs, forced(adapted, found), rtol=1e-4, atol=1e-4)


def test_adapters_on_experts_are_refused_before_anything_is_asked(server, connected):
    """They are on parameters of three dimensions, which are not merged one matrix at a time."""
    shape = {"vocab_size": 264, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    lm = MixtralForCausalLM(MixtralConfig(**shape, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2))
    experts = next(name for name, parameter in lm.named_parameters() if "experts" in name and parameter.ndim == 3)
    LoraModel(lm, LoraConfig(r=2, target_modules=[], target_parameters=[experts]), "default")
    first = server()
    with pytest.raises(SamplerError, match=r"does not support LoRA on experts .*leave out --sampler"):
        connected(first, policy=Policy(lm))
    assert first.seen()["orders"] == []


def test_a_server_sleeps_while_it_does_not_sample(server, connected, policy, draw, monkeypatch):
    """It wakes when the trainer has given its unused memory back, and its cache takes memory when its weights are loaded.

    Here the CPU has what torch has for accelerators.
    """
    first = server()
    emptied = partial(httpx2.post, f"{first.url}/note/emptied", trust_env=False)
    monkeypatch.setattr(torch.cpu, "empty_cache", emptied, raising=False)
    servers = connected(first, policy=policy, sampler_sleep=True)
    assert_same(draw(servers), draw(servers))
    with torch.no_grad():
        next(policy.parameters()).add_(0.5)
    draw(servers)
    weights, cache, emptied = "/wake_up weights", "/wake_up kv_cache", "/note/emptied"
    assert first.seen()["orders"] == [
        *("/sleep", emptied, weights, "heedful_load", cache),
        *("/sleep", emptied, weights, cache),
        *("/sleep", emptied, weights, "heedful_load", cache, "/sleep"),
    ]


def test_a_token_that_cannot_be_sent(connected, policy, monkeypatch):
    monkeypatch.setenv("HEEDFUL_SAMPLER_TOKEN", "密码")
    said = "HEEDFUL_SAMPLER_TOKEN contains other characters than visible ASCII"
    with pytest.raises(ConfigError, match=said) as error:
        connected(SimpleNamespace(name="vllm:http://127.0.0.1:9"), policy=policy)
    assert "密码" not in str(error.value)
