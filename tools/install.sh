#!/bin/sh
# Install a lock file into a virtual environment: sh tools/install.sh PYTHON LOCK VENV [--project]
#
# uv does it in a tenth of pip's time. Where there is none, pip fetches the one that requirements-uv.lock pins, into .cache; where
# that fails as well, pip installs. With --project this checkout is installed, too, so that its files are used where they are.
set -eu
python=$1 lock=$2 venv=$3 project=${4:-}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "BigFleet needs Python 3.11 or newer; $python is older. Try: make PYTHON=python3.12" >&2
  exit 1
}
echo "installing $lock into $venv"

# A mirror that pip was given is uv's as well.
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] && [ -n "${PIP_INDEX_URL:-}" ]; then
  export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
fi

# Print where uv is, and fetch it before if there is none.
find_uv() {
  command -v uv && return
  [ ! -x .cache/uv/uv ] || { echo .cache/uv/uv; return; }
  place=$(mktemp -d) || return
  fetched=1
  if "$python" -m pip --version >"$place/log" 2>&1; then
    fetcher=$python
  else
    "$python" -m venv "$place/venv" >>"$place/log" 2>&1 && fetcher=$place/venv/bin/python
  fi
  if "${fetcher:-false}" -m pip install --quiet --disable-pip-version-check --no-compile --only-binary :all: --require-hashes \
    --target "$place/packages" --requirement requirements-uv.lock >>"$place/log" 2>&1; then
    mkdir -p .cache/uv && mv "$place/packages/bin/uv" .cache/uv/uv && fetched=0 && echo .cache/uv/uv
  else
    echo "uv could not be fetched, and pip takes ten times as long:" >&2
    tail -n 1 "$place/log" >&2
  fi
  rm -rf "$place"
  return "$fetched"
}

# Packages that are added to an environment leave its Python as it is.
is_there() {
  [ -z "$project" ] && [ -x "$venv/bin/python" ]
}

# Each worker of the tests imports most modules; for a run of `make up` most are never imported, and bytecode takes half of the room.
case $lock in
requirements-dev.lock) uv_compiles=--compile-bytecode pip_compiles=--compile ;;
*) uv_compiles=--no-compile-bytecode pip_compiles=--no-compile ;;
esac

with_uv() {
  { is_there || "$1" venv --quiet --allow-existing --python "$python" "$venv"; } &&
    "$1" pip install --quiet --python "$venv/bin/python" "$uv_compiles" --require-hashes --requirements "$lock" &&
    if [ -n "$project" ]; then
      "$1" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
    fi
}

with_pip() {
  is_there || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$pip_compiles" --require-hashes \
    --requirement "$lock"
  if [ -n "$project" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
  fi
}

if uv=$(find_uv); then
  with_uv "$uv" && exit
  echo "uv could not install $lock; pip tries it" >&2
fi
with_pip
