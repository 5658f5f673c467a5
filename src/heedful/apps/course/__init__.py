"""The course: lessons to run as notebooks, each with automatically checked exercises.

A lesson is a MyST notebook kept as text (jupytext ``md:myst``). To write one, or to change one:

1. ``lessons/en/05_gae.md`` and ``lessons/zh/05_gae.md``: the number is that of the file name, the title its first heading.
   No list names the lessons. Both have the same code cells, byte for byte, with comments in English.
2. `SECTIONS` are the second-level headings, in this order; a colon may add to one: ``## The formula: GAE``.
3. Steps are ``course.steps(60)``, so that the quick form takes seconds. Models and data come from `demo_model`, `demo_data`
   and `demo_world`, so that lessons run in any order and twice. Variables have the names of the equations; seeds are set.
4. The first code cell holds the imports: ``heedful course check`` runs it before the exercises, and no other cell.
5. Three cells are tagged ``exercise``: a function with the task as its docstring and ``...`` as its body, and below it
   ``course.check("5.1", gae_by_hand)``.
6. ``checks/lesson05.py`` has ``check_1(answer)`` to ``check_3``, which raise AssertionError with one line (`checks.same`).
   ``tests/course/solutions/lesson05.py`` has ``answer_1`` and ``wrong_1`` for each; no other file has a solution.
7. ``pytest tests/course``, then ``python tests/course/run_lessons.py --full --outputs FOLDER 5``: read the outputs, look at
   the pictures, and explain the numbers in the text.
8. Chinese has one word for one thing: token 词元, prompt 提示词, response 回答, pair 回答对, policy 策略, reference 参考模型,
   reward model 奖励模型, reward 奖励, return 回报, critic 价值函数, advantage 优势 or 优势函数, baseline 基线, ratio 概率比,
   clip 裁剪, truncate 截断, mask 掩码, padding 填充, end token 结束符, sample 采样, batch 批次, minibatch 小批次, epoch 轮次,
   episode 回合, turn 轮, environment 环境, seed 随机种子, held out 留出, judge 裁判, gold judge 标准裁判, labeller 标注员,
   reward hacking 钻奖励的空子. A word that a reader must find in code has its English once in parentheses:
   价值函数（critic）. No space in ``92%``; one space between Chinese and Latin letters, digits, code or formulas, none
   beside Chinese punctuation.
"""

import warnings

from heedful.apps.course.catalogue import SECTIONS, steps
from heedful.apps.course.exercises import check
from heedful.apps.course.lesson_models import demo_data, demo_model, demo_world
from heedful.display import silence

__all__ = ["SECTIONS", "check", "demo_data", "demo_model", "demo_world", "silence", "steps"]

warnings.filterwarnings("ignore", message="IProgress not found")  # lessons need no progress bars of transformers
