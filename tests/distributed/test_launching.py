"""recipes/launch: what torchrun is told, by torchrun's own parser; and the scripts, run as two machines on this one."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from heedful import PPOConfig
from heedful.configs.parse import parse
from launched import free_port

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "recipes" / "launch"
STAND_IN = """#!{python}
import os, signal, subprocess, sys, time
name, arguments = sys.argv[0].rpartition("/")[2], sys.argv[1:]
if name == "torchrun":
    with open(os.environ["SEEN"], "a", encoding="utf-8") as file:
        print(*map(repr, arguments), file=file)
    time.sleep(float(os.environ.get("SECONDS_LONG", "0")))
    sys.exit(int(os.environ.get("ENDS_WITH", "0")))
if name == "scontrol":
    if arguments[0] == "show":
        print("first.example\\nsecond.example")
    else:
        with open(os.environ["SEEN"], "a", encoding="utf-8") as file:
            print("requeue", file=file)
if name == "srun":  # a task on each machine
    flags = arguments[: arguments.index("bash")]
    if "--cpus-per-task=64" not in flags or "--kill-on-bad-exit=0" not in flags or "--wait=300" not in flags:
        sys.exit("srun would give each task one processor, or kill ranks that save")
    tasks = [subprocess.Popen(arguments[len(flags) :], env=os.environ | {{"SLURM_NODEID": str(i)}}) for i in range(2)]
    signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
    sys.exit(max(abs(task.wait()) for task in tasks))
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """``cluster(script, *words)`` runs a script where torchrun and Slurm only write down what they are told."""
    for name in ("torchrun", "srun", "scontrol"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(STAND_IN.format(python=sys.executable), encoding="utf-8")
        path.chmod(0o755)
    seen = tmp_path / "seen"

    def run(script, *words, is_ended=False, **variables):
        seen.write_text("", encoding="utf-8")
        environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SEEN": str(seen)} | variables
        process = subprocess.Popen(["bash", str(LAUNCH / script), *words], env=environment, cwd=ROOT)
        if is_ended:
            while seen.read_text(encoding="utf-8").count("\n") < 2:
                time.sleep(0.05)
            process.terminate()
        status = process.wait(timeout=300)
        lines = seen.read_text(encoding="utf-8").splitlines()
        return status, [shlex.split(line) if "'" in line else line for line in lines]

    return run


def as_torchrun_reads(arguments):
    found = get_args_parser().parse_args(arguments)
    assert found.module
    assert found.training_script == "heedful"
    return found


WORDS = ("ppo", "--model", "m", "--data", "d.jsonl", "--output", "运行 1", "--rewards", "rule:digits")


def test_one_machine(cluster):
    status, (told,) = cluster("one-node.sh", *WORDS, RANKS="4")
    found = as_torchrun_reads(told)
    assert (status, found.standalone, found.nproc_per_node) == (0, True, "4")
    command, *flags = found.training_script_args
    assert (command, parse(PPOConfig, flags, prog="heedful ppo").output) == ("ppo", Path("运行 1"))
    assert as_torchrun_reads(cluster("one-node.sh", *WORDS)[1][0]).nproc_per_node == "gpu"


def test_two_machines(cluster):
    _, (told,) = cluster("two-nodes.sh", *WORDS, HEAD="first.example", NODE="1")
    found = as_torchrun_reads(told)
    assert parse_min_max_nnodes(found.nnodes) == (2, 2)
    assert (found.node_rank, found.master_addr, found.master_port) == (1, "first.example", 29500)
    assert found.training_script_args == list(WORDS)


def test_slurm_starts_a_task_per_machine_and_queues_again_what_was_asked_to_end(cluster):
    variables = {"SLURM_JOB_NODELIST": "x[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "41234"}
    variables["SLURM_CPUS_PER_TASK"] = "64"
    status, told = cluster("slurm.sh", *WORDS, **variables)
    found = sorted((as_torchrun_reads(arguments) for arguments in told), key=lambda one: one.node_rank)
    assert status == 0
    assert [one.node_rank for one in found] == [0, 1]
    assert {(one.master_addr, one.master_port, one.nnodes) for one in found} == {("first.example", 21234, "2")}
    assert all(one.training_script_args == list(WORDS) for one in found)
    status, told = cluster("slurm.sh", *WORDS, SECONDS_LONG="600", is_ended=True, **variables)
    assert (status > 0, told[-1]) == (True, "requeue")
    status, told = cluster("slurm.sh", *WORDS, ENDS_WITH="2", **variables)
    assert (status, len(told)) == (2, 2)  # a mistake is not queued again
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (LAUNCH / "slurm.sh").read_text("utf-8"), re.MULTILINE)
    assert dict(options)["ntasks-per-node"] == "1"
    assert dict(options)["cpus-per-task"] == "64"
    assert dict(options)["signal"] == "B:TERM@300"  # to the script, which passes it on


def test_kubernetes_has_a_rank_of_its_machine_for_each_pod(monkeypatch):
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    patience, variable = container["env"]
    monkeypatch.setenv(patience["name"], patience["value"])
    assert LaunchConfig(1, 1, 1).shutdown_timeout == int(patience["value"]) < pod["terminationGracePeriodSeconds"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"].endswith("['batch.kubernetes.io/job-completion-index']")
    told = [word.replace(f"$({variable['name']})", "1") for word in container["command"] + container["args"]]
    assert told.pop(0) == "torchrun"
    found = as_torchrun_reads(told)
    assert spec["completions"] == spec["parallelism"] == parse_min_max_nnodes(found.nnodes)[0]
    assert spec["completionMode"] == "Indexed"
    name, domain = found.master_addr.split(".")
    assert name == f"{job['metadata']['name']}-0"
    assert domain == pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    assert found.training_script_args[0] == "ppo"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.fixture
def sft(tiny, tmp_path):
    """``sft(script, output, ...)`` is a script that fine-tunes a tiny model, started."""
    data = tmp_path / "数据.jsonl"
    rows = [{"prompt": f"第{i}题", "completion": f"答案{i}"} for i in range(16)]
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    bin_folder = Path(sys.executable).parent

    def start(script, output, *flags, **variables):
        words = ["--model", tiny(), "--data", data, "--output", output, "--device", "cpu", "--dtype", "float32"]
        environment = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "RANKS": "1"} | variables
        return subprocess.Popen(
            ["bash", str(LAUNCH / script), "sft", *map(str, words), "--batch-size", "4", *flags], env=environment
        )

    return start


@pytest.mark.exhaustive
def test_two_machines_for_real(sft, tmp_path):
    """Both are this one; each has a torchrun of its own."""
    port = str(free_port())
    machines = [
        sft("two-nodes.sh", tmp_path / "run", "--max-steps", "3", HEAD="127.0.0.1", NODE=node, PORT=port)
        for node in ("0", "1")
    ]
    assert [machine.wait(timeout=600) for machine in machines] == [0, 0]
    assert json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))["steps"] == 3


@pytest.mark.exhaustive
def test_one_machine_that_is_asked_to_end_goes_on(sft, tmp_path):
    """torchrun passes the request on, waits for the checkpoint, and the same command resumes from there."""
    run = tmp_path / "run"
    machine = sft("one-node.sh", run, "--max-steps", "3000", RANKS="2")
    while not (run / "metrics.jsonl").is_file() or (run / "metrics.jsonl").read_bytes().count(b"\n") < 5:
        time.sleep(0.2)
    machine.terminate()
    assert machine.wait(timeout=600) != 0
    (checkpoint,) = (run / "checkpoints").iterdir()
    done = int(checkpoint.name.removeprefix("step-"))
    again = sft("one-node.sh", run, "--max-steps", "3000", RANKS="2")
    while json.loads((run / "metrics.jsonl").read_text("utf-8").splitlines()[-1])["step"] < done + 3:
        time.sleep(0.2)
    again.terminate()
    again.wait(timeout=600)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert steps == sorted(steps)
    assert steps.count(done) == 1
