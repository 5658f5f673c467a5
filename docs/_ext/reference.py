"""Directives for the reference: public names with their docstrings, and every command."""

import pkgutil

from docstrings import LATEX, escape, restructured
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


def docstring(app, what, name, obj, options, lines):
    latex = []
    if name.startswith("heedful.core.") and name.count(".") == 2 and name.rsplit(".")[-1] in LATEX:
        mathematics, anchor = LATEX[name.rsplit(".")[-1]]
        for block in mathematics:
            latex += [".. math::", "", *(f"   {line}" for line in block.splitlines() if line.strip()), ""]
        latex += [f"`This formula with symbols, settings and numbers <page:formulas#{anchor}>`__", ""]
    lines[:] = restructured(lines, latex)


def signature(app, what, name, obj, options, arguments, returns):
    """Settings have a page of their own; their 150 names are no signature."""
    return ("(**settings)", None) if what == "class" and name.endswith("Config") else None


class Public(SphinxDirective):
    """``.. public:: heedful.core.advantages`` documents what a module of core makes public, ``.. public:: heedful NAME ...``
    these names of heedful, each under the name by which it is imported."""

    required_arguments, final_argument_whitespace = 1, True

    def run(self):
        module, *names = self.arguments[0].split()
        home = "heedful.core" if module.startswith("heedful.core") else module
        loaded = pkgutil.resolve_name(module)
        lines = [f".. py:currentmodule:: {home}", ""]
        for name in names or loaded.__all__:
            value = getattr(loaded, name)
            kind = "class" if isinstance(value, type) else "function" if callable(value) else "data"
            if kind == "class" and issubclass(value, Exception):
                kind = "exception"
            lines += [f".. auto{kind}:: {module if kind == 'data' else home}.{name}"]  # only there is what explains it
            if kind == "class" and not name.endswith("Config"):
                lines += ["   :members:"]
            lines += [""]
        return self.parse_text_to_nodes(StringList(lines, source=self.env.docname))


class Commands(SphinxDirective):
    """A table of every command, from `heedful.cli.command_table`."""

    def run(self):
        from heedful.cli.command_table import COMMANDS

        rows = [".. list-table::", "   :header-rows: 1", "", "   * - command", "     - what it does"]
        for name, command in COMMANDS.items():
            rows += [f"   * - ``heedful {name}``", f"     - {escape(command.summary)}"]
        return self.parse_text_to_nodes(StringList(rows, source=self.env.docname))


def setup(app):
    app.add_directive("public", Public)
    app.add_directive("commands", Commands)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-process-signature", signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
