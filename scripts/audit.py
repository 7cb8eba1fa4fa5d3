"""Audits the installed dependencies: known vulnerabilities (pip-audit), and licences (pip-licenses).

make audit
"""

import json
import re
import subprocess
import sys
from typing import Any

PERMITTED = re.compile(
    r"(MIT(-CMU| License)?|(3-Clause )?BSD(-[23]-Clause| License)?|0BSD|ISC( License \(ISCL\))?|Zlib"
    r"|Apache(-| )?(2\.0|Software License)( License)?( WITH LLVM-exception)?|CC0-1\.0|CNRI-Python"
    r"|AFL-2\.1|Unlicense|PSF-2\.0|Python Software Foundation License"
    r"|MPL-2\.0|Mozilla Public License 2\.0 \(MPL 2\.0\))"
)
"""Licences under which a dependency may be used by any program that imports it."""


def permits(licence: str) -> bool:
    """True if all parts of a licence, or one of its alternatives, are permitted."""
    alternatives = re.split(r"\s+OR\s+", licence)
    return any(
        all(PERMITTED.fullmatch(part) for part in re.split(r"\s+AND\s+|;\s*", _bare(each)))
        for each in alternatives
    )


def _bare(licence: str) -> str:
    """A licence without parentheses around the whole of it."""
    licence = licence.strip()
    return licence[1:-1] if licence.startswith("(") and licence.endswith(")") else licence


def judged(report: dict[str, Any]) -> tuple[list[str], int, int]:
    """The vulnerabilities in pip-audit's report, a line each; and the packages with data, and all.

    An index without vulnerability data is said, not passed over in silence.
    """
    found, packages = [], report["dependencies"]
    with_data = [package for package in packages if "skip_reason" not in package]
    for package in with_data:
        for each in package["vulns"]:
            mended = ", ".join(each["fix_versions"]) or "no version"
            found.append(
                f"{package['name']} {package['version']}: {each['id']}, mended in {mended}"
            )
    return found, len(with_data), len(packages)


def _output(*command: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"{command[0]} failed: {done.stderr.strip()[-500:]}") from None


def main() -> int:
    """Prints both audits; returns 1 for a known vulnerability or a licence that is not permitted."""
    vulnerable, audited, packages = judged(
        _output("pip_audit", "--local", "--format", "json", "--progress-spinner", "off")
    )
    licences = _output("piplicenses", "--format", "json")
    wrong = [each for each in licences if not permits(each["License"])]
    wrong = [each for each in wrong if each["Name"] != "jaxshare"]
    for each in sorted(licences, key=lambda each: each["Name"].lower()):
        print(f"{each['Name']} {each['Version']}: {each['License']}")
    print(f"\n{len(licences)} licences, of which {len(wrong)} are not permitted")
    for each in wrong:
        print(f"not permitted: {each['Name']}: {each['License']}")
    print(f"{audited} of {packages} packages audited, {len(vulnerable)} known vulnerabilities")
    if not audited:
        print("the package index gives no data on vulnerabilities: nothing is known of them")
    print(*vulnerable, sep="\n")
    return int(bool(wrong or vulnerable))


if __name__ == "__main__":
    raise SystemExit(main())
