"""Set-up of every test: the environment is known, annotations of the mathematics are checked at run time, threads are few,
seeds are fixed."""

# ruff: noqa: E402

import atexit
import gc
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from urllib.request import ProxyHandler, Request, build_opener

# Nothing of the person's environment changes a result, here or in what tests start. torch, rich and Hugging Face's libraries
# read it when they are imported. What only some tests need is kept: HEEDFUL_TEST_*, and a vLLM of the person's.
PERSONS = re.compile(
    r"HEEDFUL_(?!TEST_|VLLM_)|HF_|HUGGING|TRANSFORMERS_|DATASETS_|MODELSCOPE_|WANDB_|MLFLOW_|TRACKIO_|SWANLAB_|LC_|LANG|TORCH"
    r"|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(HTTPS?|FTP|ALL|NO)_PROXY"
    r"|COLUMNS|LINES|TZ|TERM|NO_COLOR|FORCE_COLOR|TTY_COMPATIBLE|TTY_INTERACTIVE|PYTHON(WARNINGS|UTF8|IOENCODING)"
    r"|OMP_WAIT_POLICY|GOMP_SPINCOUNT|KMP_BLOCKTIME|XDG_CACHE_HOME|MPLBACKEND|MPLCONFIGDIR|MATPLOTLIBRC)$",
    re.IGNORECASE,
)
for name in filter(PERSONS.match, [*os.environ]):
    del os.environ[name]
CACHE = tempfile.TemporaryDirectory(prefix="heedful-tests-")  # no token and no model that this machine has
os.environ |= {"LANG": "C.UTF-8", "TZ": "UTC", "TERM": "xterm", "HF_HOME": CACHE.name}
time.tzset()
os.umask(0o022)
if sys.warnoptions:  # of PYTHONWARNINGS or -W: pytest has its own
    sys.warnoptions.clear()
    warnings.resetwarnings()

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

from architectures import DECODERS
from in_browser import chromium

# Before anything imports heedful: shapes, dtypes and plain types of the mathematics are checked here, and only here.
install_import_hook(["heedful.core", "heedful.kernels.head_logprobs"], "beartype.beartype")

if sys.getfilesystemencoding() != "utf-8":
    raise pytest.UsageError(
        "the tests have Chinese file names, which Python cannot write here: unset PYTHONUTF8 or LC_ALL"
    )

# Hundreds of processes would else compile heedful anew, and every worker all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Workers that run beside each other (pytest -n 3) and the commands that they start have one thread each: more would fight.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
torch.set_num_threads(min(2, torch.get_num_threads()))

# A shell lets jobs in its background ignore Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test cuts the power: nothing waits for the disk, which was a third of a tiny run's time.
os.fsync = lambda descriptor: None

# The same examples on every run, and no database in the working tree.
settings.register_profile("heedful", deadline=None, database=None, derandomize=True, max_examples=40)
settings.load_profile("heedful")


def pytest_collection_finish() -> None:
    """Ten thousand tests and what they import stay until the end: there is no garbage to look for among them."""
    gc.collect()
    gc.freeze()


# Where there is no GPU, torch notes the seed for the day when there is one, with a traceback: a millisecond a test.
SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _seed() -> None:
    SEED(20240217)


@pytest.fixture(autouse=True)
def _settings_as_flags(request):
    """Messages name settings by flags, as after a command. Tests that are marked ``in_python`` read those of Python."""
    from heedful.configs.settings import answering_command

    if request.node.get_closest_marker("in_python"):
        yield
    else:
        with answering_command():
            yield


class Outcome:
    """What a command said and how it ended."""

    def __init__(self, status, out, err):
        self.status = status
        self.out = out
        self.err = err
        self.message = " ".join(err.split())
        """Standard error with line breaks and runs of spaces as one space."""


@pytest.fixture
def heedful(capsys):
    """``heedful("sft", "recipe.yaml", "--overwrite", max_steps=3)`` runs a command in this process."""

    from heedful.cli.main import main

    def run(*words, **flags):
        capsys.readouterr()
        words += tuple(part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value))
        try:
            status = main([str(word) for word in words])
        except SystemExit as stopped:
            status = stopped.code or 0
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture
def written(tmp_path):
    """``written(name, records)`` is the path of a file: JSONL of records, or a text as it is."""

    def write(name, content):
        path: Path = tmp_path / name
        if not isinstance(content, str):
            content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in content)
        path.write_text(content, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """``tiny(architecture)`` is the folder of a tiny model, made once."""
    from heedful import make_tiny_model

    root = tmp_path_factory.mktemp("模型")

    def folder(architecture="gpt2", *, max_length=128):
        path = root / f"{architecture}-{max_length}"
        if not path.is_dir():
            make_tiny_model(architecture, path, hidden_size=32, num_layers=2, max_length=max_length)
        return str(path)

    return folder


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
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from heedful import make_tiny_model

    root = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(7)
    for architecture in (*DECODERS, "deberta-v2"):
        make_tiny_model(architecture, root / architecture, hidden_size=32)
        is_decoder = architecture in DECODERS
        sharpen(root / architecture, AutoModelForCausalLM if is_decoder else AutoModelForSequenceClassification)
    return {architecture: root / architecture for architecture in (*DECODERS, "deberta-v2")}


@pytest.fixture(params=["gpt2", "qwen3", *(pytest.param(a, marks=pytest.mark.exhaustive) for a in ("llama", "qwen2"))])
def decoder(request, checkpoints):
    """The folder of each decoder in turn. qwen2 is llama with biases, so its tests are exhaustive."""
    return str(checkpoints[request.param])


@pytest.fixture(scope="session")
def thinker(tmp_path_factory):
    """``thinker()`` is the folder of a tiny model with the tokens and the chat template of a thinking model, made once.

    ``thinker(template)`` has another template. It has one token per byte, and tokens of its own for ``<think>`` and tools,
    which are not special, as Qwen3's are not.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from heedful import make_tiny_model

    root = tmp_path_factory.mktemp("思考")
    folders = {}

    def folder(template=None):
        template = template or (Path(__file__).parent / "templates" / "qwen3_type.jinja").read_text(encoding="utf-8")
        if template not in folders:
            path = folders[template] = str(root / f"{len(folders)}")
            make_tiny_model("qwen3", path, hidden_size=32, num_layers=2, max_length=512)
            tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
            tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
            tags = ("think", "tool_call", "tool_response")
            tokenizer.add_tokens([f"<{slash}{tag}>" for tag in tags for slash in ("", "/")])
            tokenizer.chat_template = template
            model.resize_token_embeddings(len(tokenizer))
            model.generation_config.eos_token_id = [
                tokenizer.eos_token_id,
                tokenizer.convert_tokens_to_ids("<|im_end|>"),
            ]
            tokenizer.save_pretrained(path)
            model.save_pretrained(path)
        return folders[template]

    return folder


@pytest.fixture(scope="session")
def malformed():
    """What `malformed.py` has: requests that are none."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "malformed.py")))


class ChatServer:
    """A running `chat_server.py`."""

    def __init__(self, port):
        self.address = f"http://127.0.0.1:{port}"
        self.judge = f"judge:{self.address}/v1#gold"
        self._open = build_opener(ProxyHandler({})).open

    def faults(self, **faults):
        """What it does wrong from now on; what it has seen is forgotten."""
        self._open(Request(f"{self.address}/faults", data=json.dumps(faults).encode())).close()

    def seen(self):
        with self._open(f"{self.address}/seen") as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def gold_prompts(tmp_path_factory):
    """Prompts of the demo's world, Chinese ones too, with what its gold judge needs to know."""
    from heedful.apps.demo.world import instructions

    path = tmp_path_factory.mktemp("gold") / "题目.jsonl"
    chosen = instructions()[::11]
    rows = [{"prompt": one.prompt, "family": one.family, "answer": one.answer} for one in chosen]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def chat_server(gold_prompts):
    """A judge that knows the answers of ``gold_prompts``, behind an OpenAI-compatible API."""
    command = [sys.executable, str(Path(__file__).parent / "chat_server.py"), gold_prompts]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield ChatServer(int(process.stdout.readline()))
        finally:
            process.kill()


class Forked:
    """A process that has begun as a copy of this one, which has loaded torch and what else takes seconds to load.

    It has an environment and a folder of its own, one thread, signals as a shell gives them, both streams, and an exit
    status; but also what this one has loaded and opened. What it says is kept in files, so nobody needs to read along.
    """

    def __init__(self, work, *, cwd=None, env=None):
        self.returncode = None
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  closed when it is read
        self._said = ()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1  # whatever happens, no copy of the tests goes on
            try:
                status = self._run(work, cwd, env)
            finally:
                os._exit(status)

    def _run(self, work, cwd, env):
        from heedful import faults

        gc.freeze()
        atexit._clear()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for number, file in enumerate(self._files, 1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8") for number in (1, 2))
        status = 0
        try:
            os.chdir(cwd or ".")
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)  # the threads of the process that was copied are not there
            faults.plan(os.environ.get(faults.VARIABLE, ""))  # which is otherwise read when it is loaded
            work()
        except SystemExit as stopped:
            status = stopped.code or 0
            if not isinstance(status, int):
                print(status, file=sys.stderr)
                status = 1
        except BaseException:
            traceback.print_exc()
            status = 1
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        return status

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def communicate(self, timeout=300):
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        self._said = self.said()
        for file in self._files:
            file.close()
        self._files = []
        return self._said

    def said(self):
        """What it has written to both streams so far."""
        return self._said or tuple(os.pread(file.fileno(), 2**26, 0).decode() for file in self._files)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


@pytest.fixture(scope="session")
def forked():
    """``forked(work, cwd=..., env=...)`` starts ``work()`` in a process of its own, within milliseconds.

    Beside a GPU torch computes no gradients in a copy of a process that has computed some.
    """
    if torch.cuda.is_available():
        pytest.skip(
            "processes of tests are copies, in which torch cannot use a GPU; set CUDA_VISIBLE_DEVICES= to run it"
        )
    return Forked


@pytest.fixture(scope="session")
def forked_heedful(forked):
    """``forked_heedful(*words, cwd=..., env=...)`` starts the command in a process of its own, within milliseconds."""

    def start(*words, **options):
        def work():
            sys.argv = ["heedful", *map(str, words)]
            runpy.run_module("heedful", run_name="__main__")

        return forked(work, **options)

    return start


@pytest.fixture(scope="session")
def browser():
    """One headless Chromium for all rooms: its thread then has an event loop that runs, in which no second one starts."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install heedful[test])"
    )
    path = chromium()
    if path is None:
        pytest.skip("there is no Chromium (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=path, args=[*flags, "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def axe():
    """``axe(page)`` is what axe-core finds wrong with a page."""
    script = pytest.importorskip("axe_core_python.base", reason="axe-core-python is not installed").AXE_SCRIPT

    def found(page):
        if not page.evaluate("'axe' in window"):
            page.evaluate(script)
        # to list all that is well as well takes three quarters of the time
        return page.evaluate("axe.run({resultTypes: ['violations']}).then(found => found.violations)")

    return found
