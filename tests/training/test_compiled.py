"""--compile on: the same numbers by compiled layers, and a run that ends before it starts if compiling fails."""

import contextlib
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers import AutoModelForCausalLM

import heedful
from heedful import ConfigError, SFTConfig, make_tiny_model
from heedful.configs.parse import parse
from heedful.kernels.weights import inference_copy
from heedful.models import byte_tokenizer, load_policy, save_policy
from heedful.training import compilation
from heedful.training.compilation import CACHE, compile_layers, repeated_layers
from heedful.training.provenance import differences
from heedful.training.setup import prepare

CPU = torch.device("cpu")

# torch's own: the one it hides, but not where warnings are errors, the other it gives while it is imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled") / "m"
    make_tiny_model("qwen3", folder, hidden_size=32, num_layers=2, initializer_range=0.2)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    (tmp_path / "m").symlink_to(made)
    return tmp_path / "m"


def config(folder, **options):
    return SFTConfig(model=str(folder), data="x", output=folder.parent / "o", **options)


def is_compiled(policy):
    return any(module._compiled_call_impl is not None for module in policy.lm.modules())


def prepared(folder, dtype=torch.float32, **options):
    policy, settings = load_policy(str(folder), device=CPU, compute_dtype=dtype), config(folder, **options)
    prepare(policy, settings, base=str(folder))
    # fresh adapters are 0 in one matrix, and its gradient hides the other
    for name, parameter in policy.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    compile_layers(settings, [policy])
    return policy


def batch(rows, length, *, shorter=1):
    """One prompt is so many tokens shorter than the others."""
    ids = torch.randint(1, 250, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :shorter] = False
    return ids, mask, torch.ones(rows, length - shorter - 3, dtype=torch.bool)


def learned(policy, rows, length, **options):
    """Log-probs and gradients of one pass."""
    logprobs = policy(*batch(rows, length, **options)).logprobs
    (logprobs**2).mean().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return {"logprobs": logprobs.detach(), **gradients}


def assert_alike(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def assert_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@contextlib.contextmanager
def out_of_memory(monkeypatch, cache):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(compilation, "_outputs", fail)
    yield


def test_a_switch_is_answered_with_the_choices(folder):
    with pytest.raises(ConfigError, match="--no-compile is not a setting of heedful sft; use --compile off"):
        parse(SFTConfig, ["--model", "m", "--data", "d", "--output", "o", "--no-compile"], prog="heedful sft")
    with pytest.raises(ConfigError, match="--compile must be one of off, on, got True"):
        config(folder, compile=True)
    assert differences({"compile": "off"}, {"compile": "on"}) == {"compile": ("off", "on")}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder for compiled code, and nothing of other tests in memory."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    torch._inductor.utils.clear_caches()
    return tmp_path / "cache"


@contextlib.contextmanager
def failing_compiler(monkeypatch, cache):
    with inductor.patch({"cpp.cxx": (None, "/bin/false")}):
        yield


@contextlib.contextmanager
def no_compiler(monkeypatch, cache):
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}):
        yield


@contextlib.contextmanager
def unwritable_cache(monkeypatch, cache):
    """A folder below a file; the superuser may write into a read-only one."""
    cache.touch()
    monkeypatch.setenv(CACHE, str(cache / "below"))
    yield


@contextlib.contextmanager
def full_cache(monkeypatch, cache):
    handler, (soft, hard) = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (unwritable_cache, "Not a directory"),
        pytest.param(no_compiler, "no-such-compiler.* needs a C\\+\\+ compiler", marks=pytest.mark.exhaustive),
        pytest.param(failing_compiler, "/bin/false", marks=pytest.mark.exhaustive),
        pytest.param(full_cache, "File too large", marks=pytest.mark.exhaustive),
        pytest.param(out_of_memory, "CUDA out of memory; compiling runs passes over 7 texts of up to 131 tokens"),
    ],
)
def test_a_run_that_cannot_be_compiled_ends_before_it_starts(folder, cache, monkeypatch, broken, said):
    """And leaves the model as it was."""
    plain, policy, random = prepared(folder), prepared(folder), torch.get_rng_state()
    failed = rf"--compile on: torch.compile does not work: .*{said}.*; --compile off trains without it"
    with broken(monkeypatch, cache), pytest.raises(ConfigError, match=failed):
        compile_layers(config(folder, compile="on"), [policy])
    monkeypatch.undo()
    assert torch.equal(torch.get_rng_state(), random)
    assert not is_compiled(policy)
    assert_equal(learned(policy, 3, 20), learned(plain, 3, 20))


@pytest.mark.parametrize("given", ["", "of torch", "named"])
def test_compiled_code_is_kept_in_a_folder_of_the_user(tmp_path, monkeypatch, given):
    """torch's own folder is one for temporary files."""
    named = {"": "", "of torch": default_cache_dir(), "named": str(tmp_path / "named")}[given]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(CACHE, raising=False)
    if named:
        monkeypatch.setenv(CACHE, named)
    compilation._keep_code()
    kept = tmp_path / ("named" if given == "named" else f".cache/heedful/torch-{torch.__version__}")
    assert os.environ[CACHE] == str(kept)


@pytest.mark.exhaustive
def test_the_folder_that_torch_takes_when_it_is_imported_is_no_persons_choice(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in (CACHE, "XDG_CACHE_HOME")}
    code = "import os; from heedful.training import compilation as c; c._keep_code(); print(os.environ[c.CACHE])"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment | {"HOME": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(tmp_path / f".cache/heedful/torch-{torch.__version__}")]


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--quantize 4bit", {"quantize": "4bit", "lora_rank": 2}),
        ("--gradient-checkpointing", {"gradient_checkpointing": True}),
    ],
)
def test_what_cannot_be_compiled_is_refused(folder, flag, options):
    with pytest.raises(ConfigError, match=f"--compile on does not go with {flag}"):
        config(folder, compile="on", **options)


def test_a_model_without_repeated_layers_is_refused(folder):
    policy = load_policy(str(folder), device=CPU, compute_dtype=torch.float32)
    lm = policy.lm
    assert repeated_layers(lm) is lm.model.layers
    lm.model.layers = torch.nn.Sequential(*lm.model.layers)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no list of repeated layers; --compile off"):
        compile_layers(config(folder, compile="on"), [policy])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cache")
def test_compiled_layers_compute_the_same_and_nothing_is_compiled_later(folder, tmp_path):
    plain, compiled = prepared(folder), prepared(folder, compile="on")
    assert is_compiled(compiled)
    counters.clear()
    for rows, length, shorter in [(3, 20, 1), (3, 32, 1), (5, 12, 1), (8, 16, 1), (3, 21, 8), (4, 14, 8)]:
        ours, theirs = (learned(policy, rows, length, shorter=shorter) for policy in (compiled, plain))
        assert_alike(ours, theirs)
        assert any(not torch.equal(ours[name], theirs[name]) for name in theirs), "ran as written, not compiled"
    with torch.no_grad():
        assert_equal(compiled(*batch(3, 20)).logprobs, plain(*batch(3, 20)).logprobs)
        inference_copy(compiled.lm, torch.float32)(input_ids=batch(2, 9)[0])
    assert not counters["stats"], "something was compiled"
    save_policy(compiled, byte_tokenizer(), tmp_path / "saved", stop_ids=[0])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert_alike(dict(loaded), dict(plain.lm.state_dict()))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cache")
def test_compiled_layers_under_adapters_compute_the_same(folder):
    options = {"lora_rank": 2, "lora_targets": "q_proj,down_proj"}
    plain, compiled = prepared(folder, **options), prepared(folder, **options, compile="on")
    assert_alike(learned(compiled, 3, 20), learned(plain, 3, 20))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cache")
def test_a_compiled_run_resumes_bit_for_bit(folder, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "bcd"}\n' * 8, encoding="utf-8")
    policy = load_policy(str(folder), device=CPU, compute_dtype=torch.float32)
    save_policy(policy, byte_tokenizer(), tmp_path / "start", stop_ids=[0])

    def run(name, compile="on", **objects):
        settings = {"model": str(tmp_path / "start"), "data": str(tmp_path / "data.jsonl"), "output": tmp_path / name}
        settings |= {"dtype": "bfloat16", "batch_size": 4, "max_steps": 4, "eval_fraction": 0.0, "learning_rate": 1e-2}
        heedful.train_sft(SFTConfig(**settings, compile=compile), **objects)

    def stop(step, _metrics):
        if step == 2:
            raise KeyboardInterrupt

    def weights(name):
        return AutoModelForCausalLM.from_pretrained(tmp_path / name / "final").state_dict()

    run("as written", compile="off")
    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("cut", on_step=stop)
    run("cut")
    assert_equal(weights("cut"), weights("whole"))
    assert any(not torch.equal(w, weights("as written")[name]) for name, w in weights("whole").items()), "not compiled"


@pytest.mark.exhaustive
def test_a_damaged_cache_changes_no_number(folder, cache):
    """Code cut short, as on a disk that was full, is compiled anew."""
    expected = learned(prepared(folder, torch.bfloat16, compile="on"), 3, 20)
    for path in cache.rglob("*"):
        if path.is_file():
            begin = path.read_bytes()[:100]
            path.unlink()  # this process has loaded the library that it is
            path.write_bytes(begin)
    torch._inductor.utils.clear_caches()
    try:
        ours = prepared(folder, torch.bfloat16, compile="on")
    except ConfigError as error:
        assert "torch.compile does not work" in str(error)  # noqa: PT017
    else:
        assert_equal(learned(ours, 3, 20), expected)
