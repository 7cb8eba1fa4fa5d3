#!/bin/sh
# Makes a virtual environment with PyTorch and whatever else is named, in the first Python for which pip finds all of it.
#
#   make_torch_env.sh FOLDER REQUIREMENT...
#
# Which build of PyTorch is installed is for pip's own configuration to say.
set -u

folder=${1:?usage: make_torch_env.sh FOLDER REQUIREMENT...}
shift
here=$(dirname "$0")
log=$(mktemp) && trap 'rm -f "$log"' EXIT && trap 'exit 130' INT TERM

tried=
for minor in 11 12 13 10; do
    python=$("$here/find_python.sh" "3.$minor" "3.$((minor + 1))" 2>/dev/null) || continue
    tried="$tried 3.$minor"
    echo "making $folder with $python: $*"
    "$python" -m venv --clear "$folder" &&
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >"$log" 2>&1 && exit 0
    cat "$log" >&2
done

rm -rf "$folder"
echo "No Python from 3.10 to 3.13 could install $*; tried:${tried:- none was found}." >&2
exit 1
