"""The experiments of Hydragen (Juravsky et al., 2024) on any model that jaxshare loads.

    python -m scripts.papers.hydragen throughput --output DIR     # figure 3, tables 1 to 6
    python -m scripts.papers.hydragen attention --output DIR      # figures 4 and 7
    python -m scripts.papers.hydragen needles --text FILE --output DIR      # figure 5
    python -m scripts.papers.hydragen apps --data-dir DIR --output DIR      # figure 6, with pass@k

Each keeps its points as they finish, and goes on after an interruption with --resume; --redraw makes
the report and the pictures again without running anything. docs/papers.md says what they make.
"""

import sys
from collections.abc import Sequence

from scripts.bench.lib import Parser, own_command
from scripts.papers import (
    folder,
    hydragen_apps,
    hydragen_attention,
    hydragen_needles,
    hydragen_throughput,
)

COMMANDS = {
    "throughput": (hydragen_throughput, "decoding end to end, by batch and prefix"),
    "attention": (hydragen_attention, "attention alone, by batch, prefix and suffix"),
    "needles": (hydragen_needles, "questions about one long document"),
    "apps": (hydragen_apps, "two levels of sharing on competition problems, and pass@k"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    program = "scripts.papers.hydragen"
    parser = Parser(prog=program, description="The experiments of Hydragen on any model.")
    commands = parser.add_subparsers(dest="experiment", required=True, parser_class=Parser)
    parsers = {}
    for name, (module, about) in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=about, description=f"Measures {about}.")
        module.add_arguments(parsers[name])
    given = parser.parse_args(arguments)
    module, _ = COMMANDS[given.experiment]
    module.check(parsers[given.experiment], given)
    command = own_command(__file__, arguments)
    return folder.exit_code(f"{program} {given.experiment}", lambda: module.run(given, command))


if __name__ == "__main__":
    sys.exit(main())
