#!/usr/bin/env bash
# Make a virtual environment that holds one real inference engine, without its GPU parts.
#
#     make_env.sh vllm   DIR
#     make_env.sh vllm-0.26 DIR     (an older release)
#     make_env.sh sglang DIR
#
# DIR is created where it is missing and left alone where it already holds what the requirements say.  layerfuse itself
# is not installed, because the caller decides how (a wheel, or an editable install):
#
#     DIR/bin/python -m pip install --no-deps -e PATH_TO_LAYERFUSE
#
# PYTHON names the interpreter to start from (default: python3).
set -euo pipefail

fail() {
    echo "make_env: $*" >&2
    exit 2
}

[[ $# -eq 2 ]] || fail "expected two arguments, ENGINE and DIR, got $#"
engine=$1
dir=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
requirements=$here/requirements-$engine.txt
requirements_nodeps=$here/requirements-$engine-nodeps.txt
[[ -f $requirements && -f $requirements_nodeps ]] ||
    fail "no engine called '$engine'; known: $(cd "$here" && printf '%s ' requirements-*-nodeps.txt |
        sed 's/requirements-//g; s/-nodeps\.txt//g')"

python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "cannot run '$python'"
wanted=$( (cat "$requirements" "$requirements_nodeps" && echo "$version") | sha256sum)
wanted=${wanted%% *}
stamp=$dir/.layerfuse-engine

if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    echo "make_env: $dir already holds $engine, nothing to do"
    exit 0
fi

# An environment that was made from other requirements, or whose making was cut short, is made again from nothing:
# pip would leave behind what the new list no longer names.  Nothing is ever cleared that was not made here.
if [[ -d $dir && ! -f $stamp && -n $(ls -A "$dir") ]]; then
    fail "$dir exists and was not made by this script; name an empty or a new folder"
fi
echo "make_env: making $dir with Python $version"
"$python" -m venv --clear "$dir"
echo "being made" >"$stamp"
pip=("$dir/bin/python" -m pip install -qq --disable-pip-version-check)

torch=$(grep -E '^torch==' "$requirements") || fail "$requirements does not pin torch"
echo "make_env: installing $torch first, so that nothing later chooses another build of it"
"${pip[@]}" "$torch"
echo "make_env: installing what $engine imports"
"${pip[@]}" -r "$requirements"
echo "make_env: installing $engine"
"${pip[@]}" --no-deps -r "$requirements_nodeps"

"$dir/bin/python" - "$torch" <<'PY' || fail "a later requirement replaced torch; see the line above"
import importlib.metadata, sys
wanted, found = sys.argv[1].removeprefix("torch=="), importlib.metadata.version("torch").split("+")[0]
sys.exit(f"torch {wanted} was asked for, {found} is installed" if found != wanted else 0)
PY
echo "$wanted" >"$stamp"
echo "make_env: $dir holds $engine ($(du -sh "$dir" | cut -f1))"
