# Sourced by quickstart and test: the virtual environment and what goes into it.
# A stamp in .venv holds the hash of what was installed, so a second run installs nothing.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
TORCH_VERSION="${TORCH_VERSION:-2.13.0}"

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
num_cores() { nproc 2>/dev/null || getconf _NPROCESSORS_ONLN; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
       "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "Python 3.11 or newer was not found; on Debian 12: apt-get install python3 python3-venv"
}

apt_install() {  # apt_install PACKAGE...: with root on Debian or Ubuntu; returns 1 where that cannot be done
  command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || return 1
  say "installing Debian packages: $*"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null 2>&1 ||
    { apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null; }
}

make_venv() {
  [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
  local python
  python="$(find_python)"
  say "making the virtual environment $VENV with $("$python" --version)"
  if ! "$python" -m venv "$VENV" >/dev/null 2>&1; then
    rm -rf "$VENV"
    apt_install python3-venv || fail "$python has no ensurepip: apt-get install python3-venv, then run this again"
    "$python" -m venv "$VENV"
  fi
}

# install_into_venv NAME PIP_ARGUMENT...
# torch comes first and by exact version, because a range may bring a newer build with several GB of CUDA libraries.
# On a GPU machine install the torch build that fits its driver beforehand (.venv/bin/pip install torch==...): any torch
# that is already there is kept. TORCH_VERSION names another version; PIP_EXTRA_INDEX_URL can add PyTorch's index of
# CPU-only builds where the default index has none.
install_into_venv() {
  local stamp="$VENV/.installed-$1" wanted
  shift
  wanted="$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/common.sh" <(echo "$TORCH_VERSION $*") | sha256sum | cut -d' ' -f1)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    say "environment $VENV is up to date"
    return
  fi
  say "installing into $VENV (some minutes the first time): torch, then $*"
  "$VENV/bin/python" -c 'import torch' 2>/dev/null || pip_install "torch==$TORCH_VERSION"
  (cd "$ROOT" && pip_install "$@")
  echo "$wanted" > "$stamp"
}

pip_install() {  # prints what is being collected; all of pip's words only when it fails
  local log
  log="$(mktemp)"
  if ! (set -o pipefail; "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1 |
      tee "$log" | { grep --line-buffered -oE '^Collecting [^ ]+' || true; }); then
    tail -n 30 "$log"
    rm -f "$log"
    fail "could not install: $* (the end of pip's messages is above)"
  fi
  rm -f "$log"
}
