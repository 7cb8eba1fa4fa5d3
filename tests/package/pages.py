"""Examples of the documents: programs, and what they print."""

import contextlib
import io
import re
from pathlib import Path

_EXAMPLE = re.compile(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", re.DOTALL)


def run_examples(page: str, folder: Path) -> tuple[int, dict[str, object]]:
    """Runs the programs of a page that are followed by what they print, and asserts that they do.

    Returns:
      how many they are, and the names that they have made.
    """
    examples = _EXAMPLE.findall(page)
    names: dict[str, object] = {}
    for number, (program, printed) in enumerate(examples):
        file, out = folder / f"example_{number}.py", io.StringIO()
        file.write_text(program, encoding="utf-8")  # agents are compiled from their source
        with contextlib.redirect_stdout(out):
            exec(compile(program, str(file), "exec"), names)
        assert out.getvalue() == printed
    return len(examples), names
