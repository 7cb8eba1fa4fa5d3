"""The page on the command line, made from the parsers of `jaxshare`."""

import argparse
from collections.abc import Iterator, Sequence

_INTRODUCTION = """# Command line

Made from the parsers of the program; `jaxshare COMMAND --help` prints the same.
[Getting started](getting_started.md#commands) says what all commands have in common.
"""

_COMMON = (["--debug"], ["--compile-cache"])
"""Options of all commands, which are described once."""


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _summaries(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The words with which the list of commands describes each."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {each.dest: each.help or "" for each in action._choices_actions}
    return {}


def _escaped(text: str) -> str:
    """A help text in a cell of a table."""
    for character in "|*_[]":
        text = text.replace(character, "\\" + character)
    return text.replace("<", "&lt;")


def _rows(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """The arguments of a parser and their help texts."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        if isinstance(action, argparse._HelpAction) or action.option_strings in _COMMON:
            continue
        name = formatter._format_action_invocation(action).replace("|", "\\|")
        yield f"`{name}`", _escaped(formatter._expand_help(action) if action.help else "")


def _section(path: Sequence[str], parser: argparse.ArgumentParser, summary: str) -> list[str]:
    name = " ".join(path)
    lines = [f"{'#' * min(len(path), 3)} {name}", ""]
    description = parser.description or summary
    lines += [f"{description[:1].upper()}{description[1:]}".rstrip(".") + ".", ""]
    rows = list(_rows(parser))
    if rows:
        lines += ["| Argument | Meaning |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows), ""]
    return lines


def page(parser: argparse.ArgumentParser) -> str:
    """The page on all commands of a parser, subcommands included."""
    lines = [_INTRODUCTION]

    def add(path: tuple[str, ...], parent: argparse.ArgumentParser) -> None:
        summaries = _summaries(parent)
        for name, each in _subcommands(parent).items():
            lines.extend(_section((*path, name), each, summaries.get(name, "")))
            add((*path, name), each)

    add((parser.prog,), parser)
    return "\n".join(lines)
