"""Writes the tables of README.md and docs/: from benchmarks/results, and limits from the code.

python -m scripts.docs.tables
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.lib import ROOT
from scripts.docs import limits

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "limits.md")
_TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(?=<!-- end -->)", re.S)

Rows = list[Sequence[str]]


def read(name: str, folder: Path = RESULTS) -> Any:
    """One file of results, without its ending."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def _by_batch(results: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
    return {each["batch"]: each for each in results}


def _goal(result: Mapping[str, Any], start: str) -> str:
    """The goal whose name starts so, or a dash."""
    found = [goal["goal"] for goal in result["goals"] if goal["name"].startswith(start)]
    return f"{found[0]:g}" if found else "-"


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def _times(number: float | None) -> str:
    """A ratio, with two decimals where it is near 1."""
    if number is None:
        return "-"
    return f"{number:.2f}" if number < 1.1 else f"{number:.1f}" if number < 20 else f"{number:.0f}"


def _markdown(rows: Rows) -> str:
    head, *rest = rows
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rest)]) + "\n"


_CASES = (
    ("decode, 1 stream", 1, "decode"),
    ("decode, 8 streams", 8, "decode"),
    ("decode, 64 streams", 64, "decode"),
    ("decode, 64 streams of one prompt", 64, "shared"),
    ("prefill, 1 prompt", 1, "prefill"),
    ("prefill, 64 prompts", 64, "prefill"),
)
"""What decode.py and llama_cpp.py both measure: its name, the batch and the part of a result."""


def _llama_cpp(result: Mapping[str, Any], batch: int, part: str) -> tuple[str, str]:
    """The tokens a second, and how many times llama.cpp's they are."""
    found = _by_batch(result["results"])[batch]
    if part != "shared":
        return (
            _rate(found[part]["tokens_per_second"]["jaxshare"]),
            _times(found[part]["ratio"]["median"]),
        )
    rate = found["shared"]["tokens_per_second"]["jaxshare, one prompt"]
    name = "decode, batch 64 of one prompt"
    [times] = [goal["measured"] for goal in result["goals"] if goal["name"].startswith(name)]
    return _rate(rate), _times(times)


def _transformers(result: Mapping[str, Any], batch: int, part: str) -> str:
    found = _by_batch(result["results"])[batch]
    if part == "prefill":
        seconds = found["prefill_seconds"]
        return _times(seconds["transformers"] / seconds["jaxshare"])
    side = "jaxshare, one prompt" if part == "shared" else "jaxshare"
    return _times(found["ratios"][side]["median"])


_GOALS = {
    "decode": "decode tokens per second, batch {batch}:",
    "shared": "decode, batch {batch} of one prompt:",
    "prefill": "prefill tokens per second, {batch} prompt",
}
"""How the names of llama_cpp.py's goals start."""


def speed() -> Rows:
    """README's table: decoding and prefill beside llama.cpp and transformers on two machines."""
    xeon, epyc, torch = read("llama_cpp"), read("llama_cpp-epyc"), read("decode")
    rows: Rows = [
        (
            "",
            "Xeon, tokens/s",
            "times llama.cpp",
            "times transformers",
            "EPYC, tokens/s",
            "times llama.cpp",
        )
    ]
    for name, batch, part in _CASES:
        peers = (*_llama_cpp(xeon, batch, part), _transformers(torch, batch, part))
        rows.append((name, *peers, *_llama_cpp(epyc, batch, part)))
    shared = [read(name)["results"]["end-to-end"][0] for name in ("sharing-quick", "sharing-epyc")]
    first, second = (_rate(each["sides"]["shared"]["tokens_per_second"]) for each in shared)
    times = _times(shared[0]["slower_than_shared"]["transformers"]["median"])
    rows.append(("decode, 64 streams over a prefix of 4,096", first, "-", times, second, "-"))
    return rows


def decode() -> Rows:
    """Decoding and prefill on the Xeon, with goals."""
    ours, torch = read("llama_cpp"), read("decode")
    rows: Rows = [
        ("", "jaxshare, tokens/s", "times llama.cpp", "goal", "times transformers", "goal")
    ]
    for name, batch, part in _CASES:
        goal = _goal(ours, _GOALS[part].format(batch=batch))
        start = f"decode tokens per second, batch {batch}:"
        other = _goal(torch, start) if part == "decode" else "-"
        measured = _llama_cpp(ours, batch, part)
        rows.append((name, *measured, goal, _transformers(torch, batch, part), other))
    return rows


def decode_epyc() -> Rows:
    """Decoding and prefill on the EPYC, with goals."""
    result = read("llama_cpp-epyc")
    rows: Rows = [("", "jaxshare, tokens/s", "times llama.cpp", "goal")]
    for name, batch, part in _CASES:
        goal = _goal(result, _GOALS[part].format(batch=batch))
        rows.append((name, *_llama_cpp(result, batch, part), goal))
    return rows


def families() -> Rows:
    """Other families against transformers."""
    files = sorted(RESULTS.glob("decode-*.json"))
    rows: Rows = [("Times transformers, at batch", "1", "8", "64", "goals")]
    for file in files:
        result = read(file.stem)
        found = _by_batch(result["results"])
        times = [
            _times(found[batch]["ratios"]["jaxshare"]["median"] if batch in found else None)
            for batch in (1, 8, 64)
        ]
        goals = [_goal(result, f"decode tokens per second, batch {n}:") for n in (1, 8, 64)]
        name, link = result["settings"]["family"], f"../benchmarks/results/{file.name}"
        cpu = "" if "Xeon" in result["machine"]["cpu"] else f", {result['machine']['cpu']}"
        rows.append((f"[{name}]({link}){cpu}", *times, ", ".join(goals)))
    return rows


def quantised() -> Rows:
    """Quantised weights against bfloat16, and against llama.cpp where that was measured."""
    result = read("quantised")
    rows: Rows = [("Weights", "model", "times", "batch 1", "8", "64")]
    for model, found in result["results"].items():
        by_batch = _by_batch(found)
        for key, peer in (("to_bf16", "bfloat16"), ("to_llama_cpp", "llama.cpp")):
            for form in {form: None for each in found for form in each[key]}:
                times = [by_batch[batch][key].get(form, {}).get("median") for batch in (1, 8, 64)]
                rows.append((form, model, peer, *map(_times, times)))
    return rows


def workers() -> Rows:
    """Milliseconds a pass of workers, and how that compares with one worker."""
    rows: Rows = [("History", "1 worker", "2 workers", "4 workers", "8 workers")]
    for each in read("workers-kernels")["results"]:
        row = [f"{each['history']:,}"]
        for number, found in each["workers"].items():
            milliseconds = f"{found['pass_milliseconds']:.1f}"
            to_one = f" ({found['to_one_worker']['median']:.2f}x)"
            row.append(milliseconds + (to_one if number != "1" else ""))
        rows.append(row)
    return rows


def hogwild() -> Rows:
    """How many times less a pass takes than with the authors' implementation."""
    rows: Rows = [("History", "2 workers", "4 workers")]
    for each in read("workers")["results"]:
        slower = [each["workers"][number]["hogwild_llm"]["times_slower"] for number in ("2", "4")]
        rows.append((f"{each['history']:,}", *(_times(times["median"]) for times in slower)))
    return rows


def sharing() -> Rows:
    """One shared prefix of 4,096 tokens, 64 rows, on two machines."""
    rows: Rows = [
        (
            "Prefix 4,096, suffix 64",
            "shared",
            "copies",
            "PyTorch SDPA, transformers",
            "no attention",
        )
    ]
    for machine, file in (("Xeon", "sharing-quick"), ("EPYC", "sharing-epyc")):
        results = read(file)["results"]
        for part, field, what, other in (
            ("attention", "milliseconds", "attention of one layer, ms", "SDPA"),
            ("end-to-end", "tokens_per_second", "decoding, tokens/s", "transformers"),
        ):
            found = results[part][0]
            cells = []
            for side in ("shared", "unshared", other, "no attention"):
                times = found["slower_than_shared"].get(side)
                if side not in found["sides"]:
                    cells.append("-")
                    continue
                number = found["sides"][side][field]
                cell = f"{number:.2f}" if number < 2 else _rate(number)
                with_times = side != "no attention" and times
                cells.append(cell + (f" ({_times(times['median'])}x)" if with_times else ""))
            rows.append((f"{what}, {machine}", *cells))
    return rows


def passes() -> Rows:
    """Passes until 90% of the questions are right, by number of workers."""
    results = read("collaboration")["results"]
    rows: Rows = [("Workers", "1", "2", "4", "6")]
    for case, name in (("workers", "five questions"), ("five to ten", "five to ten questions")):
        found = results[case]["passes_to_90"]
        one = found["1"]
        cells = [
            f"{found[n]:.0f}" + ("" if n == "1" else f" ({found[n] / one:.2f}x)") for n in "1246"
        ]
        rows.append((f"{name}: passes", *cells))
    return rows


_FOUR = (
    ("workers", "four workers, combined layout"),
    ("asked", "asked whether redundant, every 64 tokens"),
    ("encoded anew", "finished steps encoded again, not rotated"),
    ("contiguous", "contiguous layout"),
    ("interleaved", "interleaved: workers do not see unfinished steps"),
    ("self-consistency", "self-consistency, asked for an answer"),
    ("vote", "self-consistency, by vote"),
    ("skeleton", "Skeleton-of-Thought"),
)


def ablations() -> Rows:
    """Four workers, what changes when one thing about them does, and baselines with four rows."""
    results = read("collaboration")["results"]
    rows: Rows = [("Four rows", "passes to 90%", "right at the end")]
    for case, name in _FOUR:
        to_90 = results[case]["passes_to_90"]["4"]
        right = [point["accuracy"] for point in results[case]["points"] if point["workers"] == 4]
        accuracy = f"{100 * right[-1]:.1f}%".replace("100.0%", "100%")
        rows.append((name, "never" if to_90 is None else f"{to_90:.0f}", accuracy))
    return rows


_OF_ATTENTION = ("contexts", "prefixes", "prefill", "workers", "shared", "private")
_OURS = ("mosaic_gpu", "triton", "xla")


def gpu(folder: Path = RESULTS) -> Rows:
    """The results of `make gpu`: of each pass the fastest of our backends, and the others'; of
    sampling XLA's and a bisection's; of a 7B-shaped model's decode step all backends."""
    head = ("", "jaxshare", "of the device's copies or products", "others")
    if not (folder / "gpu.json").exists():
        return [head, ("nothing has been measured on a GPU yet", "-", "-", "-")]
    rows: Rows = [head]
    parts = read("gpu", folder)["results"]
    points: dict[str, Any] = {}
    for part in parts.values():
        if part["benchmark"] == "attention":
            for name in _OF_ATTENTION:
                found = part["results"].get(name, [])
                for point in found if isinstance(found, list) else [found]:
                    points[f"attention, {point['case']}, G {point['group']}"] = point
    for name, point in points.items():
        sides = point["sides"]
        times = {side: each["microseconds"] for side, each in sides.items()}
        workers = f", {point['case'].split(',')[0]}"  # sides of workers have their number
        own = {side: time for side, time in times.items() if side.removesuffix(workers) in _OURS}
        if not own:
            continue
        best = min(own, key=lambda side: own[side])
        share = max(sides[best]["of_copy"], sides[best]["of_products"])
        others = [f"{s} {_rate(t)} us" for s, t in times.items() if s.split(",")[0] not in _OURS]
        rows.append((name, f"{_rate(own[best])} us ({best})", _times(share), ", ".join(others)))
    for setting, found in parts.get("sampling", {}).get("results", {}).items():
        times = {side: statistics.median(each) for side, each in found["milliseconds"].items()}
        own = times.pop("jaxshare")
        others = ", ".join(f"{side} {time:.3f} ms" for side, time in times.items())
        rows.append((f"sampling, {setting}", f"{own:.3f} ms", "-", others))
    for each in parts.get("step", {}).get("results", {}).get("step", []):
        for side, found in each["sides"].items():
            rate, share = _rate(found["tokens_per_second"]), _times(found["of_limit"])
            rows.append((f"decode, batch {each['batch']}, {side}", f"{rate} tokens/s", share, "-"))
    return rows


TABLES: Mapping[str, Callable[[], Rows]] = {
    "speed": speed,
    "decode": decode,
    "decode-epyc": decode_epyc,
    "families": families,
    "quantised": quantised,
    "workers": workers,
    "hogwild": hogwild,
    "sharing": sharing,
    "passes": passes,
    "ablations": ablations,
    "limits": limits.table,
    "gpu": gpu,
}


def written(document: Path) -> str:
    """A document with its tables in their places."""
    text = document.read_text(encoding="utf-8")
    return _TABLE.sub(lambda found: found[1] + _markdown(TABLES[found[2]]()), text)


def goals(folder: Path = RESULTS) -> str:
    """Markdown with every goal of the results: measured, and met or missed."""
    parts = []
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        found = result.get("goals", [])
        if not found or "benchmark" not in result:
            continue
        rows: Rows = [("Goal", "measured", "goal", "")]
        for goal in found:
            measured = "not measured" if goal["measured"] is None else f"{goal['measured']:.3g}"
            bound = "at most" if goal["at_most"] else "at least"
            met = {True: "met", False: "**missed**"}.get(goal["met"], "")
            rows.append((goal["name"], measured, f"{bound} {goal['goal']:g}", met))
        machine = result["machine"]
        where = f"`{result['command']}`\n\n{machine['cores']} cores of {machine['cpu']}."
        parts.append(f"## {file.stem}\n\n{where}\n\n{_markdown(rows)}")
    return "\n".join(parts)


def main() -> None:
    """Writes the tables into the documents."""
    for document in DOCUMENTS:
        document.write_text(written(document), encoding="utf-8")


if __name__ == "__main__":
    main()
