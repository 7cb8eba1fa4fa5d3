#!/bin/sh
# Prints the path of a Python interpreter whose version lies in [LOW, HIGH), and which can make virtual environments.
#
#   find_python.sh LOW HIGH [PREFERRED]      for example: find_python.sh 3.12 3.15 3.12
#
# Looks on PATH, then in pyenv's versions, then asks uv (which may install one). A candidate counts only if it runs and says
# its own version: a name on PATH can be a pyenv shim with nothing behind it. Exits 1, saying what to install, if none is found.
set -u

low=${1:?usage: find_python.sh LOW HIGH [PREFERRED]}
high=${2:?usage: find_python.sh LOW HIGH [PREFERRED]}
preferred=${3:-$low}

fits() {
    "$1" -c '
import sys
try:
    import ensurepip, venv
except ImportError:
    sys.exit(1)
low, high = (tuple(int(part) for part in arg.split(".")) for arg in sys.argv[1:])
sys.exit(not low <= sys.version_info[:2] < high or "t" in getattr(sys, "abiflags", ""))  # few wheels exist for free threading
' "$low" "$high" </dev/null >/dev/null 2>&1
}

# Shims only forward: print the interpreter behind one, which stays valid whatever pyenv selects later.
found() {
    "$1" -c 'import sys; print(sys.executable)' </dev/null
    exit 0
}

# "3.12 3.15" -> the minor versions 12, 13 and 14, newest first, the preferred one before them.
names=python$preferred
minor=${high#3.}
while [ "$minor" -gt "${low#3.}" ]; do
    minor=$((minor - 1))
    names="$names python3.$minor"
done

for name in $names python3 python; do
    candidate=$(command -v "$name" 2>/dev/null) && fits "$candidate" && found "$candidate"
done

versions=${PYENV_ROOT:-${HOME:-}/.pyenv}/versions
for name in $names; do
    for candidate in "$versions/${name#python}"/bin/python3 "$versions/${name#python}".*/bin/python3; do
        [ -x "$candidate" ] && fits "$candidate" && found "$candidate"
    done
done

if command -v uv >/dev/null 2>&1; then
    for action in find install; do
        [ "$action" = find ] || uv python install "$preferred" >&2 || continue
        candidate=$(uv python find --no-project ">=$low,<$high" 2>/dev/null) && fits "$candidate" && found "$candidate"
    done
fi

cat >&2 <<MESSAGE
No Python >= $low and < $high (with its venv module) was found on PATH, in $versions, or by uv. Install one, for example:
    Debian, Ubuntu   apt install python$preferred python$preferred-venv
    macOS            brew install python@$preferred
    anywhere         pyenv install $preferred, or uv python install $preferred
MESSAGE
exit 1
