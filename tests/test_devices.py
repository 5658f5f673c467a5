"""What kinds of device can do, and random states and memory of one that torch gets from Python."""

import pytest
import torch
from torch.utils import backend_registration

from heedful import ConfigError, devices
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.training.performance import most_memory_gb
from heedful.training.state import random_state, set_random_state


class Pretend:
    """The module of a kind of device written in Python, with two devices; see `torch.utils.backend_registration`."""

    def __init__(self):
        self.generators = [torch.Generator().manual_seed(place) for place in range(2)]
        self.called = []

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda _seed: None)
    get_device_name = staticmethod("pretend {}".format)
    mem_get_info = staticmethod(lambda device: [None, (1000, 8000)][device.index])
    memory_reserved = staticmethod(lambda device: [None, 200][device.index])
    max_memory_allocated = staticmethod(lambda device: [None, 3 * 10**9][device.index])
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    is_bf16_supported = staticmethod(lambda: True)

    def get_rng_state(self, place=0):
        return self.generators[place].get_state()

    def set_rng_state(self, state, place=0):
        self.generators[place].set_state(state)

    def set_device(self, device):
        self.called.append(f"set_device {device.index}")

    def synchronize(self):
        self.called.append("synchronize")

    def empty_cache(self):
        self.called.append("empty_cache")


def named():
    backend_registration._setup_privateuseone_for_python_backend("pretend", module := Pretend())
    assert resolve_device("pretend") == torch.device("pretend")
    assert resolve_device("pretend:1") == torch.device("pretend", 1)
    assert module.called == ["set_device 1"]
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="'pretend:2' does not exist; this machine has 2 pretend devices"):
        resolve_device("pretend:2")
    with pytest.raises(ConfigError, match="--cuda-graphs on: pretend has no CUDA graphs"):
        resolve_device("pretend", graphs=True)
    pretend = torch.device("pretend")
    assert resolve_dtype("auto", pretend) is torch.bfloat16
    with pytest.raises(ConfigError, match="--dtype float16 is not available on pretend; choose float32 or bfloat16"):
        resolve_dtype("float16", pretend)


def kept_and_restored():
    backend_registration._setup_privateuseone_for_python_backend("pretend", module := Pretend())
    own = torch.Generator().manual_seed(7)
    saved, dropout = random_state(own), devices.dropout_state()
    drawn = [torch.rand(3, generator=one) for one in module.generators]
    set_random_state(own, saved)
    again = [torch.rand(3, generator=one) for one in module.generators]
    assert torch.equal(torch.stack(drawn), torch.stack(again))
    devices.set_dropout_state(dropout)
    assert torch.equal(torch.rand(3, generator=module.generators[0]), drawn[0])  # of the current device
    here = module.get_rng_state(1)
    set_random_state(own, {**saved, "pretend": saved["pretend"][:1]})  # a run of one device
    assert torch.equal(module.get_rng_state(0), saved["pretend"][0])
    assert torch.equal(module.get_rng_state(1), here)
    set_random_state(own, {"cuda": saved["pretend"], **{name: saved[name] for name in saved if name != "pretend"}})
    assert torch.equal(module.get_rng_state(1), here)


def asked_for_memory():
    backend_registration._setup_privateuseone_for_python_backend("pretend", module := Pretend())
    second = torch.device("pretend", 1)
    assert devices.device_names() == ["pretend 0", "pretend 1"]
    assert (devices.free_memory(second), devices.total_memory(second)) == (1200, 8000)
    assert most_memory_gb(second) == 3
    devices.synchronize(second)
    devices.empty_cache()
    assert module.called == ["synchronize", "empty_cache"]

    def silent(_device):
        raise RuntimeError("The device doesn't support querying the available free memory")

    module.mem_get_info = silent
    assert devices.free_memory(second) is devices.total_memory(second) is None


@pytest.mark.parametrize("used", [named, kept_and_restored, asked_for_memory])
def test_a_device_that_torch_gets_from_python_is_used_like_cuda(forked, used):
    """In a process of its own: torch has one device of this kind, for good."""
    process = forked(used)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


@pytest.mark.parametrize("changed", ["none", "host", "device"])
def test_a_copy_on_the_host_is_known_until_one_of_both_changes(changed):
    """On torch's device without numbers."""
    host = torch.tensor([1, 2, 3])
    there = devices.upload(host, torch.device("meta"))
    assert devices.known_on_host(there) is host
    if changed != "none":
        {"host": host, "device": there}[changed][0] = 9
        assert devices.known_on_host(there) is None


def test_the_cpu_has_no_accelerators_state_and_no_memory_of_its_own():
    if torch.accelerator.is_available():
        pytest.skip("needs a machine without an accelerator")
    cpu, own = torch.device("cpu"), torch.Generator()
    assert random_state(own).keys() == {"generator", "torch", "python"}
    assert devices.dropout_state()[1] is None
    assert devices.device_names() == []
    assert devices.free_memory(cpu) is devices.total_memory(cpu) is devices.peak_memory(cpu) is None
    devices.empty_cache()
    devices.synchronize(cpu)


class Generators:
    """torch's generators of two CUDA devices, or of an Apple GPU, on a machine without."""

    def __init__(self, monkeypatch, kind, count):
        self.states = [torch.Generator().manual_seed(place).get_state() for place in range(count)]
        module = getattr(torch, kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
        monkeypatch.setattr(module, "device_count", lambda: count)
        monkeypatch.setattr(module, "get_rng_state", self.get if kind == "cuda" else lambda: self.get(0))
        monkeypatch.setattr(module, "set_rng_state", self.set if kind == "cuda" else lambda state: self.set(state, 0))

    def get(self, place):
        return self.states[place]

    def set(self, state, place):
        self.states[place] = state


def test_a_run_saved_before_resumes_with_cudas_states(monkeypatch):
    """Its list is under the key cuda, as it is now."""
    generators, own = Generators(monkeypatch, "cuda", 2), torch.Generator()
    saved = {"generator": own.get_state(), "torch": torch.get_rng_state(), "cuda": generators.states[:],
             "python": random_state(own)["python"]}  # fmt: skip
    assert random_state(own).keys() == saved.keys()
    assert random_state(own)["cuda"] == saved["cuda"]
    generators.states = ["other", "numbers"]
    set_random_state(own, saved)
    assert generators.states == saved["cuda"]


def test_apples_gpu_has_one_generator_without_a_number(monkeypatch):
    generators, own = Generators(monkeypatch, "mps", 1), torch.Generator()
    saved = random_state(own)
    assert saved["mps"] == generators.states
    generators.states = ["other"]
    set_random_state(own, saved)
    assert generators.states == saved["mps"]
    set_random_state(own, {**saved, "mps": []})
    assert generators.states == saved["mps"]
