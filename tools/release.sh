#!/usr/bin/env bash
# Build sdist and wheel into dist/, install the wheel into a new environment outside the tree, and use it there.
set -euo pipefail
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$tree/dist"

"${PYTHON:-python3}" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet --disable-pip-version-check build
"$work/build/bin/python" -m build --outdir "$tree/dist" "$tree"  # the wheel is built from the sdist

"${PYTHON:-python3}" -m venv "$work/env"
wheel=$(echo "$tree"/dist/*.whl)
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c "$tree/constraints.txt" "$wheel[train]"

cd "$work"
unset PYTHONPATH
export PATH=$work/env/bin:$PATH
set -x
[[ $(python -c 'import trialogue; print(trialogue.__file__)') == "$work"/env/* ]]
[[ $wheel == *"$(trialogue --version | awk '{print $NF}')"* ]]
trialogue init bakery
trialogue check bakery
trialogue eval bakery --agent oracle --user agenda --split all run.name=oracle
trialogue view runs/oracle --export oracle.html
grep -q '</html>' oracle.html
trialogue sft shop sft.count=40 sft.epochs=1 "tasks.levels=[1]" run.name=cold
trialogue eval shop --agent runs/cold --tasks 2 "tasks.levels=[1]"
