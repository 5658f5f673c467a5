"""Environments of the tests."""

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path


class Guess:
    """A word is to be guessed; the tools are in TRL's form."""

    def reset(self, word="苹果", **columns):
        self.word, self.tries, self.columns = word, 0, columns
        return f" It has {len(word)} letters."

    def guess(self, word: str):
        """Guess the word.

        Args:
            word: The guess.
        """
        self.tries += 1
        if word == "raise":
            raise ValueError("不行")
        return "yes" if word == self.word else {"no": self.tries}

    async def wait(self, seconds: float, name: str):
        """Wait.

        Args:
            seconds: How long.
            name: What is returned.
        """
        await asyncio.sleep(seconds)
        return name

    def get_reward(self):
        return 1.0 / (1 + self.tries)


class Household:
    """Tools are the methods that TRL takes: of the class too, but no static ones. A property is not read."""

    def reset(self, **columns):
        pass

    @classmethod
    def count(cls, word: str):
        """Count letters.

        Args:
            word: The word.
        """
        return len(word)

    @staticmethod
    def helper(path):
        return path

    @property
    def broken(self):
        raise RuntimeError("坏了")


class Reader:
    """It wants the prompt, as TRL gives it."""

    def reset(self, prompt, goal):
        return f" {prompt[-1]['role']} {prompt[-1]['content']} {goal}"


class Talk:
    """Talk without tools: the other one replies until it is content."""

    def reset(self, goal=2, **columns):
        self.goal, self.said = goal, []

    def _reply(self, text):
        self.said.append(text)
        return None if len(self.said) >= self.goal else f"问 {len(self.said)}"

    def _turn_reward(self):
        return 0.5 * len(self.said)

    def get_reward(self):
        return 10.0


class Parrot:
    """It asks back what it was told, as often as it is told to, and pays that number for each turn."""

    def reset(self, goal, **columns):
        self.goal, self.turn = goal, 0

    def _reply(self, text):
        self.said, self.turn = text, self.turn + 1
        return None if self.turn >= self.goal else f"{text}？"

    def _turn_reward(self):
        return float(self.said)


class Once:
    """It says nothing, and pays nothing."""

    def reset(self, **columns):
        pass


class Faulty:
    """Does to its process what the text says."""

    def reset(self, at="", **columns):
        self.made = getattr(self, "made", 0) + 1
        self.at = at
        if at == "reset":
            raise RuntimeError("坏了")

    def _reply(self, text):
        if text == "hang":
            time.sleep(60)
        if text == "exit":
            os._exit(3)
        if text == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "raise":
            raise RuntimeError("坏了")
        if text == "number":
            return 3
        if text == "leave":
            raise SystemExit(1)
        return f"made {self.made}, drew {random.random()}"

    def get_reward(self):
        return float("nan") if self.at == "nan" else 1.0


class Slow:
    def reset(self, **columns):
        pass

    def _reply(self, text):
        time.sleep(0.05)
        return "done"


class Untyped:
    def reset(self, **columns):
        pass

    def act(self, x):
        """No types."""


class Unmade:
    def __init__(self):
        raise KeyError("no key")

    def reset(self, **columns):
        pass


class NoReset:
    def get_reward(self):
        return 0.0


class Dice:
    """Pays what it draws."""

    def reset(self, **columns):
        self.drawn = random.random()
        return f" {self.drawn:.3f}"

    def _reply(self, text):
        return str(random.randint(0, 9))

    def get_reward(self):
        return self.drawn + random.random()


class Echo:
    """Says half a character."""

    def reset(self, **columns):
        return " \ud83d"

    def _reply(self, text):
        return "\ud83d"


class Endless:
    def reset(self, **columns):
        pass

    def _reply(self, text):
        return "长" * 10_000_000


class Drawn:
    """Draws when it is made, with numpy that nobody has imported before."""

    def __init__(self):
        import numpy

        self.numpy = numpy
        self.first = random.random()

    def reset(self, **columns):
        return f" {self.first} {random.random()} {self.numpy.random.rand()}"


class Unspeakable:
    def reset(self, **columns):
        pass

    def _reply(self, text):
        class Error(Exception):
            def __str__(self):
                raise RuntimeError

        raise Error


class Forking:
    def reset(self, **columns):
        os.fork()
        return "mine"


class Letters:
    """Three turns, each paid by its share of the letter a."""

    def reset(self, **columns):
        self.turn, self.share = 0, 0.0

    def _reply(self, text):
        self.share, self.turn = text.count("a") / max(len(text), 9), self.turn + 1
        return "on" if self.turn < 3 else None

    def _turn_reward(self):
        return self.share


class Deadly(Dice):
    """Notes its process in a folder. If that has a file ``armed`` with a process, it kills that one and acts for a minute."""

    def reset(self, folder, **columns):
        self.folder = Path(folder)
        (self.folder / f"{os.getpid()}.pid").touch()
        return super().reset()

    def _reply(self, text):
        armed = self.folder / "armed"
        if armed.exists():
            os.kill(int(armed.read_text()), signal.SIGKILL)
            time.sleep(60)
        return super()._reply(text)


def are_gone(pids):
    """Whether none of some processes is alive, after five seconds at most."""
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def is_alive(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def end_turns_soon(model):
    """Have the policy in a folder end its turns at a third of all tokens."""
    path = Path(model, "generation_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, *range(3, 256, 3)]}))
