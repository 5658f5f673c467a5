"""Cases of training.py with settings of divided models, one after another; test_divided_runs.py starts it in several ranks.

divided_training.py INPUTS OUTPUT SETTINGS CASE ...        (settings as JSON)
"""

import json
import os
import sys
from pathlib import Path

import torch
import training

from heedful.parallel import ranks


def main(inputs, output, settings, *names):
    torch.set_num_threads(1)
    os.chdir(inputs)
    for name in names:
        training.run(name, Path(output) / name, **json.loads(settings))
    print(json.dumps({"rank": ranks.rank()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
