"""Lines of the source by room, of tests, words of documents, what an import loads: `python benchmarks/counts.py`."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "heedful"
TRUNK = {
    *("core", "models", "data", "engines", "rewards", "algorithms", "training", "tracking", "planning"),
    *("checks", "distributed", "kernels", "evaluate", "configs"),
}


def kinds_of_lines(text):
    """Lines of a Python file: all, and those of code, docstrings and comments; the rest is blank."""
    tree, docstrings = ast.parse(text), set()
    for node in ast.walk(tree):
        for one in getattr(node, "body", None) or [] if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                docstrings |= {*range(one.lineno, one.end_lineno + 1)}
    code, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        lines = {*range(token.start[0], token.end[0] + 1)}
        if token.type == tokenize.COMMENT:
            comments |= lines
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            code |= lines
    code -= docstrings
    return Counter(
        all=len(text.splitlines()), code=len(code), docstrings=len(docstrings), comments=len(comments - code)
    )


def room_of(path):
    first, *rest = path.relative_to(SOURCE).parts
    if first == "apps" and rest[1:]:
        return f"apps/{rest[0]}"
    return first if (SOURCE / first).is_dir() else "(top level)"


def reached(module):
    """Modules and lines of heedful that importing one loads."""
    program = (
        f"import sys, {module}\n"
        "print(*{m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'heedful' and m.__file__}, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    files = [Path(line) for line in done.stdout.splitlines()]
    return len(files), sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main():
    rooms, files, said = {}, Counter(), Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        rooms.setdefault(room_of(path), Counter()).update(kinds_of_lines(text))
        files[room_of(path)] += 1
        said.update(re.findall(r"(?:isinstance|getattr)\(config\b", text))
    print("| room | files | lines | code | docstrings | comments |\n|---|---|---|---|---|---|")
    rows = sorted(rooms.items(), key=lambda item: -item[1]["all"])
    trunk = [room for room in rooms if room in TRUNK]
    for name, members in ((room, [room]) for room, _ in rows):
        show(name, members, rooms, files)
    show("**trunk**", trunk, rooms, files)
    show("**all**", [*rooms], rooms, files)
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    patterns = [":(glob)*.md", ":(glob)docs/*.md", ":(glob)docs/results/*.md"]
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    documents = [path for line in listed.stdout.splitlines() if not (path := ROOT / line).is_symlink()]
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in documents)
    print(f"\ntests: {sum(len(text.splitlines()) for text in tests):,} lines in {len(tests)} files")
    print(f"README, docs and results, without lessons: {words:,} words")
    for module in ("heedful.algorithms.ppo", "heedful.algorithms.sft"):
        modules, lines = reached(module)
        print(f"import {module}: {modules} modules, {lines:,} lines")
    print(", ".join(f"{name}: {count}" for name, count in sorted(said.items())))


def show(name, members, rooms, files):
    total = sum((rooms[member] for member in members), Counter())
    lines = " | ".join(f"{total[kind]:,}" for kind in ("all", "code", "docstrings", "comments"))
    print(f"| {name} | {sum(files[member] for member in members)} | {lines} |")


if __name__ == "__main__":
    main()
