"""heedful serve-reward: the same scores over HTTP as in the process, and a message for every request that is wrong."""

import json
import socket

import httpx2
import pytest
import torch

from heedful import Message, PPOConfig, Prompt, Reward, RewardError, train_ppo
from heedful.apps.serving.connections import Server, bound
from heedful.apps.serving.rewards import ENDING, RequestQueue, answer, longest_text, running, score_requests
from heedful.cli.main import main
from heedful.data.chat import RewardInputs
from heedful.errors import MachineError
from heedful.models import load_reward_model, load_tokenizer
from heedful.rewards import Completion, score
from heedful.rewards.http import HTTPReward
from heedful.rewards.models import ModelReward
from heedful.types import ToolCall

MAX_BYTES = 20_000
COMPLETIONS = [
    Completion(Prompt("苹果是什么颜色？", "d:1"), "红色。"),
    Completion(Prompt("say hi", "d:2", {"n": 1}), "hi 😀", truncated=True),
    Completion(Prompt((Message("system", "简短"), Message("user", "你好")), "d:3"), "您好！"),
    Completion(Prompt("", "d:4"), ""),
]


@pytest.fixture(scope="module")
def served(reward, serving):
    """The address of a server: the real process that receives requests, and the model in a thread of this one."""
    with serving(reward, model="评分/模型", max_request_mb=MAX_BYTES / 1e6) as address:
        yield address


def post(served, content):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {"Content-Type": "application/json"}
    return httpx2.post(f"{served}/score", content=body, headers=headers, trust_env=False, verify=False)


def test_the_scores_are_the_models_own(served, reward):
    """Raw text, a conversation, cut and empty responses, Chinese: exactly, since JSON keeps every bit of a number."""
    own, _ = score([Reward("m", reward)], COMPLETIONS)
    over_http, _ = score([Reward("h", HTTPReward(f"{served}/score"))], COMPLETIONS)
    assert over_http == own
    assert len(set(own)) == 4
    in_twos, _ = score([Reward("h", HTTPReward(f"{served}/score", micro_batch_size=2))], COMPLETIONS)
    assert in_twos == pytest.approx(own, abs=1e-6)


def test_the_documented_request_by_hand(served, reward):
    answer = post(served, {"prompts": ["问"], "completions": ["答"]})
    assert (answer.status_code, list(answer.json())) == (200, ["scores"])
    assert answer.json()["scores"] == reward(["问"], ["答"], [False])
    cut = post(served, {"prompts": ["问"], "completions": ["答"], "truncated": [True], "columns": {"x": [1]}}).json()
    assert cut["scores"] == reward(["问"], ["答"], [True]) != answer.json()["scores"]
    assert post(served, {"prompts": [], "completions": []}).json() == {"scores": []}


def test_thinking_and_tools_arrive_at_the_server(thinker, serving):
    """What the template shows of them is read, and the scores are those of the model in this process."""
    name = thinker()
    tokenizer = load_tokenizer(name)
    model = load_reward_model(name, tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32, seed=3)
    reward = ModelReward(model.eval(), RewardInputs(tokenizer))
    tools = json.dumps([{"type": "function", "function": {"name": "加"}}])
    call = Message("assistant", "", thinking="想", tool_calls=(ToolCall("加", '{"x": 1}', "c1"),))
    asked = (Message("user", "1+1?", tools=tools), call, Message("tool", "2", tool_call_id="c1"))
    completions = [
        Completion(Prompt(prompt, "d:1"), text, truncated=cut)
        for prompt in (asked, (Message("user", "1+1?"), *asked[1:]), asked[:1])
        for text, cut in (("二", False), ("<think>\n加\n</think>\n\n二", False), ("<think>\n加", True))
    ]
    with serving(reward) as address:
        over_http, _ = score([Reward("http", HTTPReward(f"{address}/score"))], completions)
    own, _ = score([Reward("model", reward)], completions)
    assert over_http == own
    assert len(set(own)) == len(own)


MESSAGE = {"role": "user", "content": "问"}


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"\xff", "not valid JSON"),
        (b"[" * 15_000, "recursion depth exceeded"),
        (b'{"prompts": [], "completions": [], "columns": ' + b"1" * 5_000 + b"}", "for integer string"),
        ([], "must be a JSON object"),
        ({"completions": ["a"]}, '"prompts" must be a list, got None'),
        ({"prompts": ["a", "b"], "completions": ["a"]}, "the same length, got 2, 1 and 1"),
        ({"prompts": ["a"], "completions": ["a"], "truncated": [1]}, '"truncated" must be a list of true and false'),
        ({"prompts": ["a", 5], "completions": ["a", "b"]}, "prompts[1] must be a string or a list of messages"),
        ({"prompts": [[]], "completions": ["a"]}, "prompts[0] must be"),
        ({"prompts": [[MESSAGE | {"mood": "froh"}]], "completions": ["a"]}, "`prompts[0][0]` is an object with role"),
        ({"prompts": [[MESSAGE | {"tools": [5]}]], "completions": ["a"]}, "`tools[0]` is 5"),
        ({"prompts": ["a"], "completions": ["\ud800"]}, "completions[0] contains half a character"),
        ({"prompts": ["短"], "completions": ["长" * 100]}, "longer than the 128 tokens that the reward model reads"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_request_is_told_what_is_wrong(served, content, fragment):
    answer = post(served, content)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert fragment in answer.json()["error"]


def test_too_large_a_request(served):
    """Also where the client sends it all before it listens."""
    answer = post(served, b" " * (MAX_BYTES + 1))
    assert (answer.status_code, answer.json()["error"][:35]) == (413, "the request is larger than 20000 by")
    fits = {"prompts": ["a"], "completions": ["b"], "columns": {"x": ["y" * (MAX_BYTES - 200)]}}
    assert post(served, fits).status_code == 200
    assert post(served, b" " * 5_000_000).status_code == 413


def test_another_address(served):
    for method, path, status in (("GET", "/", 404), ("POST", "/scores", 404), ("GET", "/score", 405)):
        answer = httpx2.request(method, served + path, trust_env=False, verify=False)
        assert answer.status_code == status
        assert "POST /score and GET /health" in answer.json()["error"]


@pytest.fixture
def run(tiny, tmp_path, written):
    """``run(reward, name)`` is what one step of PPO comes to: its scores, and the weights after it."""
    prompts = written("prompts.jsonl", [{"prompt": f"问{i}", "n": i} for i in range(12)])
    sizes = {"steps": 1, "rollout_batch_size": 4, "minibatch_size": 4, "max_new_tokens": 4, "sample_every": 0}

    def train(reward, name):
        config = PPOConfig(
            **sizes, model=tiny("gpt2"), data=prompts, output=tmp_path / name, rewards=(reward,), eval_fraction=0.3,
            reward_retry_minutes=0.0 if reward.startswith("http") else 10.0, learning_rate=1e-3, device="cpu",
            dtype="float32",
        )  # fmt: skip
        summary = train_ppo(config)
        assert "reward/unread_frac" not in summary["last_step"]
        scores = [summary[key]["eval/score_mean"] for key in ("first_evaluation", "last_evaluation")]
        return scores, (config.output / "final" / "model.safetensors").read_bytes()

    return train


def test_a_run_with_it_is_the_run_with_the_model_itself(run, served, folder):
    """PPO bit for bit, evaluations included."""
    scores, weights = run(f"{served}/score", "http")
    assert (scores, weights) == run(f"model:{folder}", "model")
    assert scores[0] != scores[1]


def test_a_run_without_its_server_leaves_nothing_behind(run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    with pytest.raises(RewardError, match=f"{url} gave no scores: ConnectError.*--reward-retry-minutes 0"):
        run(url, "http")
    assert not (tmp_path / "http").exists()


def test_memory_that_runs_out_costs_one_request(serving, capfd):
    """It is status 500, as any failure and a score that is no number, which is not sent: a client tries again and gives up
    with the message. What went wrong inside is said on standard error, one line in some seconds, and not to clients."""
    found = iter([torch.OutOfMemoryError("显存不足 /secret"), *[ValueError("坏了")] * 2, *[float("nan")] * 2, 5.0])

    def reward(prompts, completions, truncated):
        one = next(found)
        if isinstance(one, Exception):
            raise one
        return [one] * len(completions)

    with serving(reward, max_characters=1000) as url:
        answers = [post(url, {"prompts": ["问"], "completions": ["答"]}) for _ in range(6)]
    errors = ["scoring failed; the server's log says why"] * 3 + [
        "the reward model gave a score that is not finite"
    ] * 2
    assert [(one.status_code, one.json()) for one in answers] == [
        *((500, {"error": error}) for error in errors),
        (200, {"scores": [5.0]}),
    ]
    assert capfd.readouterr().err == "heedful: scoring failed: OutOfMemoryError: 显存不足 /secret\n"
    said, body = [], b'{"prompts": ["a"], "completions": ["b"]}'
    assert answer(lambda *_: [float("nan")], body, max_characters=9, log=said.append) == (500, {"error": errors[-1]})
    assert said == [errors[-1]]


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve-reward", "--model", "没有", "--port", str(port), "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert f"ConfigError: --port {port} of --host 127.0.0.1 cannot be used: Address already in use" in message
    assert "--port 0 for a free one" in message


def test_what_cannot_be_served(capsys):
    for flags, fragment in (
        (["--host", "256.0.0.1"], "ConfigError: --host 256.0.0.1 is not an address of this machine"),
        (["--port", "0"], "CheckpointError: model 没有 does not exist"),
    ):
        assert main(["serve-reward", "--model", "没有", "--device", "cpu", *flags]) == 2
        assert fragment in capsys.readouterr().err


def test_a_long_text_of_few_tokens_is_scored(tiny):
    """What is refused before it is tokenised could not fit even if all its tokens were the longest of the vocabulary."""
    folder = tiny("qwen3", max_length=4000)
    tokenizer = load_tokenizer(folder)
    model = load_reward_model(folder, tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32, seed=0)
    word = "很" * 200
    tokenizer.add_tokens([word])
    model.classifier.resize_token_embeddings(len(tokenizer))
    reward = ModelReward(model.eval(), RewardInputs(tokenizer))
    assert longest_text(reward) == 4000 * 200
    body = json.dumps({"prompts": ["问"], "completions": [word * 600]}).encode()  # 120,000 characters
    status, content = answer(reward, body, max_characters=longest_text(reward), log=print)
    assert (status, len(content.get("scores", ()))) == (200, 1), content
    status, content = answer(reward, body, max_characters=100_000, log=print)
    assert (status, "completions[0] has 120000 characters; the reward model can" in content["error"]) == (400, True)


def raises(error):
    def reward(prompts, completions, truncated):
        raise error

    return reward


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        type("AcceleratorError", (RuntimeError,), {})("设备"),
    ],
)
def test_a_gpu_that_has_failed_for_good_ends_the_server(error):
    """The request at hand is told to come back, when the server may be there again."""
    requests = RequestQueue()
    waiting = requests.add(bytearray('{"prompts": ["问"], "completions": ["答"]}'.encode()))
    with pytest.raises(MachineError, match=rf"the GPU can no longer be used .*{error}.*start the server again"):
        score_requests(requests, raises(error), max_characters=1000)
    assert waiting.result(0) == ENDING


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_thread_that_receives_requests_ends_the_scoring():
    """It would wait for ever."""
    requests = RequestQueue()
    server = Server(None, most_connections=100, receive_seconds=1, end_seconds=1)
    listening = bound("127.0.0.1", 0)
    listening.close()
    with running(server, requests, listening):
        score_requests(requests, raises(AssertionError()), max_characters=1)
    assert requests.add(bytearray()).result(0) == ENDING
