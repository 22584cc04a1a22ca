#!/bin/sh
# Installs ringray on a node of aws.yaml, gcp.yaml or onprem.yaml, in the versions of constraints.txt: what runs
# ranks and drivers, and no tools of its development. A second run changes nothing that is there.
#   sh cluster/node.sh
# Triton compiles its launcher at its first launch: gcc and Python's headers are all that it needs.
set -eu
cd "$(dirname "$0")/.."
python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "cluster/node.sh: python3 is $(python3 --version 2>&1), ringray needs Python 3.11, 3.12 or 3.13" >&2
  exit 1
}
.venv/bin/python -c 'import pip' 2>/dev/null || python3 -m venv --clear .venv
install() {
  .venv/bin/python -m pip install -q --no-input --disable-pip-version-check -c constraints.txt "$@"
}
install torch hatchling
install --no-build-isolation -e '.[lab]'
