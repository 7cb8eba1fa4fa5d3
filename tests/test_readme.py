"""What README.md says runs, as it stands."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

from jaxshare.models import problems

ROOT = Path(__file__).resolve().parent.parent


def test_the_library_example_runs_and_writes_two_branches():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("\n---\n")
    answer = problems.make_problem(random.Random(0)).answers[0]
    assert f"Answer 1: {answer}." in first and f"Answer 1: {answer}." in second
